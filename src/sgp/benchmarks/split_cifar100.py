"""Split CIFAR-100: ten tasks of ten classes, in the order of their labels, each with a head of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from sgp.benchmarks.datasets import cifar
from sgp.benchmarks.datasets.images import find_data_folder
from sgp.benchmarks.settings import SplitCIFAR100
from sgp.benchmarks.stream import ClassGroup, Stream, normalize, split_classes

CLASSES = 10
# Mean and deviation of the published code.
MEAN = torch.tensor([125.3, 123.0, 113.9]).view(3, 1, 1) / 255
DEVIATION = torch.tensor([63.0, 62.1, 66.7]).view(3, 1, 1) / 255


def load_stream(settings: SplitCIFAR100, data: Path | None, seed: int) -> Stream:
    """Load the tasks from the published files."""
    images = cifar.read(find_data_folder(data, cifar.CIFAR100.name))
    labels = [range(CLASSES * task, CLASSES * (task + 1)) for task in range(settings.tasks)]
    groups = [ClassGroup(f"classes {own[0]}-{own[-1]}", task, own) for task, own in enumerate(labels)]
    prepare = partial(normalize, mean=MEAN, deviation=DEVIATION)
    return split_classes(images, groups, settings.get_shape(), prepare, settings, seed)
