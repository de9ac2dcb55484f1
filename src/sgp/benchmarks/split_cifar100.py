"""Split CIFAR-100: ten tasks of ten classes, in the order of their labels, each with a head of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from sgp.benchmarks import settings as check
from sgp.benchmarks.benchmark import Benchmark
from sgp.benchmarks.datasets import cifar
from sgp.benchmarks.datasets.images import find_data_folder
from sgp.benchmarks.stream import ClassGroup, Stream, normalize, split_classes

TASKS = 10
CLASSES = 10
# Mean and deviation of the published code.
MEAN = torch.tensor([125.3, 123.0, 113.9]).view(3, 1, 1) / 255
DEVIATION = torch.tensor([63.0, 62.1, 66.7]).view(3, 1, 1) / 255


@dataclass(frozen=True)
class SplitCIFAR100:
    """CIFAR-100 in tasks of ten classes, in the order of their labels."""

    tasks: int = TASKS
    """Number of tasks to learn, from 1 to 10."""
    validation: float = 0.05
    """Fraction of each task's training images to hold out for validation, in [0, 1)."""
    validation_seed: int | None = None
    """Seed that draws the validation images; none: the run's seed. The published code of SGP uses 0."""

    def __post_init__(self) -> None:
        check.in_range("tasks", self.tasks, 1, TASKS)
        check.share("validation", self.validation)
        check.seed("validation_seed", self.validation_seed)


def get_shape(settings: SplitCIFAR100) -> tuple[tuple[int, ...], list[int]]:
    """Return the shape of one image and the number of classes of each head."""
    return cifar.SHAPE, [CLASSES] * settings.tasks


def load_stream(settings: SplitCIFAR100, data: Path | None, seed: int) -> Stream:
    """Load the tasks from the published files."""
    images = cifar.read(find_data_folder(data, cifar.CIFAR100.name))
    labels = [range(CLASSES * task, CLASSES * (task + 1)) for task in range(settings.tasks)]
    groups = [ClassGroup(f"classes {own[0]}-{own[-1]}", task, own) for task, own in enumerate(labels)]
    prepare = partial(normalize, mean=MEAN, deviation=DEVIATION)
    return split_classes(images, groups, get_shape(settings), prepare, settings, seed)


BENCHMARK = Benchmark(
    name="split-cifar100",
    description="CIFAR-100 in ten tasks of ten classes.",
    settings=SplitCIFAR100,
    stream=load_stream,
    shape=get_shape,
    network="alexnet",
    datasets=(cifar.CIFAR100.name,),
)
