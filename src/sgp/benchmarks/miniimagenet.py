"""Split miniImageNet: twenty tasks of five random classes, each with a head of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch

from sgp.benchmarks.datasets import miniimagenet
from sgp.benchmarks.datasets.images import find_data_folder
from sgp.benchmarks.settings import SplitMiniImageNet
from sgp.benchmarks.stream import ClassGroup, Stream, normalize, split_classes

TASKS, CLASSES = 20, 5
# Mean and deviation of ImageNet.
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def load_stream(settings: SplitMiniImageNet, data: Path | None, seed: int) -> Stream:
    """Load the tasks from the files of the data set."""
    images = miniimagenet.read(find_data_folder(data, miniimagenet.NAME))
    drawn = draw_classes(seed if settings.class_seed is None else settings.class_seed)[: settings.tasks]
    groups = [ClassGroup(f"classes {' '.join(map(str, own))}", task, own) for task, own in enumerate(drawn)]
    prepare = partial(normalize, mean=MEAN, deviation=DEVIATION)
    return split_classes(images, groups, settings.get_shape(), prepare, settings, seed)


def draw_classes(seed: int) -> list[list[int]]:
    """Draw the classes of each task, as positions in the sorted list of WordNet ids.

    ACL's and TRGP's code draws them in the same way, but numbers the classes as in a data file that is not published.
    """
    order = np.random.RandomState(seed).permutation(TASKS * CLASSES)
    groups: list[list[int]] = order.reshape(TASKS, CLASSES).tolist()
    return groups
