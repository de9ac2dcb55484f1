"""Settings of the benchmark superclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.benchmarks.benchmark import Benchmark
from sgp.lazy import Deferred
from sgp.settings import MAX_SEED, Settings, setting

TASKS = 20
CLASSES = 5
ORDER_COUNT = 5
SHAPE = (3, 32, 32)


@dataclass(frozen=True)
class Superclass(Settings):
    """CIFAR-100 in tasks of the five classes of one superclass."""

    tasks: int = setting(TASKS, low=1, high=TASKS)
    """Number of tasks to learn."""
    order: int = setting(0, low=0, high=ORDER_COUNT - 1)
    """Order of the superclasses; the paper averages over all five."""
    pixels: Literal["true", "scrambled"] = "true"
    """Pixels of the inputs. true: the images; scrambled: as in the published code, which reads planar pixels as
    interleaved ones."""
    validation: float = setting(0.05, low=0, below=1)
    """Fraction of each task's training images to hold out for validation."""
    validation_seed: int | None = setting(None, low=0, high=MAX_SEED)
    """Seed that draws the validation images; none: the run's seed. The published code of SGP uses 0."""


def get_shape(settings: Superclass) -> tuple[tuple[int, ...], list[int]]:
    """Return the shape of one image and the number of classes of each head."""
    return SHAPE, [CLASSES] * TASKS


BENCHMARK = Benchmark(
    name="cifar100-superclass",
    description="CIFAR-100 in twenty tasks of five related classes, in one of five orders.",
    settings=Superclass,
    stream=Deferred("sgp.benchmarks.superclass:load_stream"),
    shape=get_shape,
    network="lenet",
    datasets=("cifar100",),
)
