"""Settings of the benchmark split-cifar100."""

from __future__ import annotations

from dataclasses import dataclass

from sgp.benchmarks.benchmark import Benchmark
from sgp.lazy import Deferred
from sgp.settings import MAX_SEED, Settings, setting

TASKS = 10
CLASSES = 10
SHAPE = (3, 32, 32)


@dataclass(frozen=True)
class SplitCIFAR100(Settings):
    """CIFAR-100 in tasks of ten classes, in the order of their labels."""

    tasks: int = setting(TASKS, low=1, high=TASKS)
    """Number of tasks to learn."""
    validation: float = setting(0.05, low=0, below=1)
    """Fraction of each task's training images to hold out for validation."""
    validation_seed: int | None = setting(None, low=0, high=MAX_SEED)
    """Seed that draws the validation images; none: the run's seed. The published code of SGP uses 0."""


def get_shape(settings: SplitCIFAR100) -> tuple[tuple[int, ...], list[int]]:
    """Return the shape of one image and the number of classes of each head."""
    return SHAPE, [CLASSES] * settings.tasks


BENCHMARK = Benchmark(
    name="split-cifar100",
    description="CIFAR-100 in ten tasks of ten classes.",
    settings=SplitCIFAR100,
    stream=Deferred("sgp.benchmarks.split_cifar100:load_stream"),
    shape=get_shape,
    network="alexnet",
    datasets=("cifar100",),
)
