"""CIFAR-100 Superclass: twenty tasks, each of the five classes of one superclass of CIFAR-100."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from sgp.benchmarks.datasets import cifar
from sgp.benchmarks.datasets.images import find_data_folder
from sgp.benchmarks.settings import Superclass
from sgp.benchmarks.stream import ClassGroup, Stream, split_classes

# Labels of the classes of each superclass; a class's label within its task is its position here.
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

# The five orders of superclasses of APD, over which the paper averages.
ORDERS = (
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19),
    (15, 12, 5, 9, 7, 16, 18, 17, 1, 0, 3, 8, 11, 14, 10, 6, 2, 4, 13, 19),
    (17, 1, 19, 18, 12, 7, 6, 0, 11, 15, 10, 5, 13, 3, 9, 16, 4, 14, 2, 8),
    (11, 9, 6, 5, 12, 4, 0, 10, 13, 7, 14, 3, 15, 16, 8, 1, 2, 19, 18, 17),
    (6, 14, 0, 11, 12, 17, 13, 4, 9, 1, 7, 19, 8, 10, 3, 15, 18, 5, 2, 16),
)


def load_stream(settings: Superclass, data: Path | None, seed: int) -> Stream:
    """Load the tasks from the published files. A task's head is its superclass, whatever the order."""
    images = cifar.read(find_data_folder(data, cifar.CIFAR100.name))
    members = list(SUPERCLASSES.items())
    groups = [ClassGroup(members[head][0], head, members[head][1]) for head in ORDERS[settings.order][: settings.tasks]]
    prepare = scale_scrambled if settings.pixels == "scrambled" else scale
    return split_classes(images, groups, settings.get_shape(), prepare, settings, seed)


def scale(images: Tensor) -> Tensor:
    """Scale bytes to [0, 1]."""
    return images.float() / 255


def scale_scrambled(images: Tensor) -> Tensor:
    """Scale bytes to [0, 1] and scramble the pixels as the published code does, following APD.

    The planes of red, green and blue of images [n, 3, 32, 32] are read as one plane of interleaved pixels: pixel
    (c, h, w) is number 96 h + 3 w + c of the planar row.
    """
    count, channels, height, width = images.shape
    return scale(images.reshape(count, height, width, channels).permute(0, 3, 1, 2).contiguous())
