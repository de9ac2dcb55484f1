"""CIFAR-100 Superclass: twenty tasks, each of the five classes that CIFAR-100 counts to one superclass."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sgp.benchmarks.datasets import cifar
from sgp.benchmarks.datasets.images import find
from sgp.benchmarks.settings.superclass import Superclass, shape
from sgp.benchmarks.stream import Examples, Stream, Task, hold_out

# Labels of each superclass, ascending; a class's label inside its task is its place here.
SUPERCLASSES = {
    "aquatic_mammals": (4, 30, 55, 72, 95),
    "fish": (1, 32, 67, 73, 91),
    "flowers": (54, 62, 70, 82, 92),
    "food_containers": (9, 10, 16, 28, 61),
    "fruit_and_vegetables": (0, 51, 53, 57, 83),
    "household_electrical_devices": (22, 39, 40, 86, 87),
    "household_furniture": (5, 20, 25, 84, 94),
    "insects": (6, 7, 14, 18, 24),
    "large_carnivores": (3, 42, 43, 88, 97),
    "large_man-made_outdoor_things": (12, 17, 37, 68, 76),
    "large_natural_outdoor_scenes": (23, 33, 49, 60, 71),
    "large_omnivores_and_herbivores": (15, 19, 21, 31, 38),
    "medium_mammals": (34, 63, 64, 66, 75),
    "non-insect_invertebrates": (26, 45, 77, 79, 99),
    "people": (2, 11, 35, 46, 98),
    "reptiles": (27, 29, 44, 78, 93),
    "small_mammals": (36, 50, 65, 74, 80),
    "trees": (47, 52, 56, 59, 96),
    "vehicles_1": (8, 13, 48, 58, 90),
    "vehicles_2": (41, 69, 81, 85, 89),
}

# Which superclass comes when: the five orders of APD, over which the paper takes its mean.
ORDERS = (
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19),
    (15, 12, 5, 9, 7, 16, 18, 17, 1, 0, 3, 8, 11, 14, 10, 6, 2, 4, 13, 19),
    (17, 1, 19, 18, 12, 7, 6, 0, 11, 15, 10, 5, 13, 3, 9, 16, 4, 14, 2, 8),
    (11, 9, 6, 5, 12, 4, 0, 10, 13, 7, 14, 3, 15, 16, 8, 1, 2, 19, 18, 17),
    (6, 14, 0, 11, 12, 17, 13, 4, 9, 1, 7, 19, 8, 10, 3, 15, 18, 5, 2, 16),
)


def stream(settings: Superclass, data: Path | None, seed: int) -> Stream:
    """The tasks, from the published files. A task's head is its superclass, in whatever order they come."""
    images = cifar.read(find(data, cifar.CIFAR100.name))
    order = ORDERS[settings.order][: settings.tasks]
    superclasses = list(SUPERCLASSES)
    held_by = seed if settings.validation_seed is None else settings.validation_seed

    def part(pixels: Tensor, labels: Tensor, superclass: int) -> Examples:
        members = torch.tensor(SUPERCLASSES[superclasses[superclass]])
        mine, ranks = torch.nonzero(labels.unsqueeze(1) == members, as_tuple=True)
        chosen = scrambled(pixels[mine]) if settings.pixels == "scrambled" else pixels[mine]
        return Examples(chosen, ranks, _from_bytes)

    def make(position: int) -> Task:
        head = order[position]
        whole = part(images.train, images.train_labels, head)
        train, validation = hold_out(whole, settings.validation, held_by)
        return Task(superclasses[head], head, train, validation, part(images.test, images.test_labels, head))

    names = [superclasses[head] for head in order]
    return Stream(names, *shape(settings), make)


def _from_bytes(images: Tensor) -> Tensor:
    return images.float() / 255


def scrambled(images: Tensor) -> Tensor:
    """Images [n, 3, 32, 32] whose planes of red, green and blue were taken for one plane of interleaved pixels.

    The published code does this, after APD: pixel (c, h, w) is number 96 h + 3 w + c of the planar row.
    """
    count, channels, height, width = images.shape
    return images.reshape(count, height, width, channels).permute(0, 3, 1, 2).contiguous()
