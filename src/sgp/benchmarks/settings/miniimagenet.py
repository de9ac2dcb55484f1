"""Settings of the benchmark miniimagenet."""

from __future__ import annotations

from dataclasses import dataclass

from sgp.benchmarks.benchmark import Benchmark
from sgp.lazy import Deferred
from sgp.settings import MAX_SEED, Settings, setting

TASKS = 20
CLASSES = 5
SIDE = 84


@dataclass(frozen=True)
class SplitMiniImageNet(Settings):
    """miniImageNet in tasks of five classes, drawn by a seed."""

    tasks: int = setting(TASKS, low=1, high=TASKS)
    """Number of tasks to learn."""
    class_seed: int | None = setting(None, low=0, high=MAX_SEED)
    """Seed that draws the classes of each task; none: the run's seed."""
    validation: float = setting(0.05, low=0, below=1)
    """Fraction of each task's training images to hold out for validation."""
    validation_seed: int | None = setting(None, low=0, high=MAX_SEED)
    """Seed that draws the validation images; none: the run's seed."""


def get_shape(settings: SplitMiniImageNet) -> tuple[tuple[int, ...], list[int]]:
    """Return the shape of one image and the number of classes of each head."""
    return (3, SIDE, SIDE), [CLASSES] * settings.tasks


BENCHMARK = Benchmark(
    name="split-miniimagenet",
    description="miniImageNet in twenty tasks of five classes.",
    settings=SplitMiniImageNet,
    stream=Deferred("sgp.benchmarks.miniimagenet:load_stream"),
    shape=get_shape,
    network="resnet18",
    datasets=("miniimagenet",),
)
