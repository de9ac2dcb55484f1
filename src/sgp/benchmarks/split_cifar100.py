"""Split CIFAR-100: ten tasks of ten classes, in the order of their labels, each with a head of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sgp.benchmarks.datasets import cifar
from sgp.benchmarks.datasets.images import find
from sgp.benchmarks.settings.split_cifar100 import CLASSES, SplitCIFAR100, shape
from sgp.benchmarks.stream import Examples, Stream, Task, hold_out

MEAN = torch.tensor([125.3, 123.0, 113.9]).view(3, 1, 1) / 255
DEVIATION = torch.tensor([63.0, 62.1, 66.7]).view(3, 1, 1) / 255


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
