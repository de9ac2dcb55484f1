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
    """How many of the twenty tasks to learn."""
    class_seed: int | None = setting(None, low=0, high=MAX_SEED)
    """Draws which classes each task has; none: the run's seed."""
    validation: float = setting(0.05, low=0, below=1)
    """Share of each task's training images that is held out for validation."""
    validation_seed: int | None = setting(None, low=0, high=MAX_SEED)
    """Draws the validation images; none: the run's seed."""


def shape(settings: SplitMiniImageNet) -> tuple[tuple[int, ...], list[int]]:
    """Of one image, and the number of classes of each head."""
    return (3, SIDE, SIDE), [CLASSES] * settings.tasks


BENCHMARK = Benchmark(
    name="split-miniimagenet",
    description="miniImageNet in twenty tasks of five classes.",
    settings=SplitMiniImageNet,
    stream=Deferred("sgp.benchmarks.miniimagenet:stream"),
    shape=shape,
    network="resnet18",
    datasets=("miniimagenet",),
)
