"""Split CIFAR-100: ten tasks of ten classes, in the order of their labels, each with a head of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sgp.benchmarks import settings as check
from sgp.benchmarks.benchmark import Benchmark
from sgp.benchmarks.datasets import cifar
from sgp.benchmarks.datasets.images import find
from sgp.benchmarks.stream import Examples, Stream, Task, hold_out

TASKS = 10
CLASSES = 10
MEAN = torch.tensor([125.3, 123.0, 113.9]).view(3, 1, 1) / 255
DEVIATION = torch.tensor([63.0, 62.1, 66.7]).view(3, 1, 1) / 255


@dataclass(frozen=True)
class SplitCIFAR100:
    """CIFAR-100 in tasks of ten classes, in the order of their labels."""

    tasks: int = TASKS
    """How many of the ten tasks to learn, from 1 to 10."""
    validation: float = 0.05
    """Share of each task's training images that is held out for validation, in [0, 1)."""
    validation_seed: int | None = None
    """Draws the validation images; none: the run's seed. The published code of SGP always has 0 here."""

    def __post_init__(self) -> None:
        check.in_range("tasks", self.tasks, 1, TASKS)
        check.share("validation", self.validation)
        check.seed("validation_seed", self.validation_seed)


def shape(settings: SplitCIFAR100) -> tuple[tuple[int, ...], list[int]]:
    """Of one image, and the number of classes of each head."""
    return cifar.SHAPE, [CLASSES] * settings.tasks


def stream(settings: SplitCIFAR100, data: Path | None, seed: int) -> Stream:
    """The tasks, from the published files in the folder."""
    images = cifar.read(find(data, cifar.CIFAR100.name))
    held_by = seed if settings.validation_seed is None else settings.validation_seed

    def make(index: int) -> Task:
        train, validation = hold_out(_part(images.train, images.train_labels, index), settings.validation, held_by)
        return Task(names[index], index, train, validation, _part(images.test, images.test_labels, index))

    names = [f"classes {CLASSES * index}-{CLASSES * index + CLASSES - 1}" for index in range(settings.tasks)]
    return Stream(names, *shape(settings), make)


def _part(images: Tensor, labels: Tensor, index: int) -> Examples:
    mine = torch.nonzero(labels // CLASSES == index).flatten()
    return Examples(images[mine], labels[mine] % CLASSES, normalised)


def normalised(images: Tensor) -> Tensor:
    """Pixels in [0, 1], then standardised with the mean and deviation of the published code."""
    return (images.float() / 255 - MEAN) / DEVIATION


BENCHMARK = Benchmark(
    name="split-cifar100",
    description="CIFAR-100 in ten tasks of ten classes.",
    settings=SplitCIFAR100,
    stream=stream,
    shape=shape,
    network="alexnet",
    datasets=(cifar.CIFAR100.name,),
)
