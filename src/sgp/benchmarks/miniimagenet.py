"""Split miniImageNet: twenty tasks of five classes, which a seed draws, each with a head of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sgp.benchmarks.datasets import miniimagenet
from sgp.benchmarks.datasets.images import find
from sgp.benchmarks.settings.miniimagenet import CLASSES, TASKS, SplitMiniImageNet, shape
from sgp.benchmarks.stream import Examples, Stream, Task, hold_out

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def stream(settings: SplitMiniImageNet, data: Path | None, seed: int) -> Stream:
    """The tasks, from the files in the folder."""
    images = miniimagenet.read(find(data, miniimagenet.NAME))
    groups = class_groups(seed if settings.class_seed is None else settings.class_seed)[: settings.tasks]
    held_by = seed if settings.validation_seed is None else settings.validation_seed

    def part(pixels: Tensor, labels: Tensor, group: list[int]) -> Examples:
        mine, ranks = torch.nonzero(labels.unsqueeze(1) == torch.tensor(group), as_tuple=True)
        return Examples(pixels[mine], ranks, normalised)

    def make(index: int) -> Task:
        whole = part(images.train, images.train_labels, groups[index])
        train, validation = hold_out(whole, settings.validation, held_by)
        return Task(names[index], index, train, validation, part(images.test, images.test_labels, groups[index]))

    names = [f"classes {' '.join(map(str, group))}" for group in groups]
    return Stream(names, *shape(settings), make)


def class_groups(seed: int) -> list[list[int]]:
    """The classes of each task, as places in the sorted list of their WordNet ids; a class's label is its place in the
    group.

    ACL's and TRGP's code draws them so too, but numbers the classes as its own data file does, which is not published.
    """
    order = np.random.RandomState(seed).permutation(TASKS * CLASSES)
    groups: list[list[int]] = order.reshape(TASKS, CLASSES).tolist()
    return groups


def normalised(images: Tensor) -> Tensor:
    """Pixels in [0, 1], then standardised with the mean and deviation of ImageNet."""
    return (images.float() / 255 - MEAN) / DEVIATION
