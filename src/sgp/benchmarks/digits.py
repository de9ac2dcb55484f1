"""Handwritten digits of 8 x 8 pixels, which come with scikit-learn, so that nothing is downloaded.

Permuted digits: every task has the same ten classes and the same images, with the pixels in another fixed order; only a
network that keeps one hidden representation per order of pixels can learn them all. Split digits: two classes a task.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from sgp.benchmarks.settings import Digits
from sgp.benchmarks.stream import Examples, Stream, Task, make_task
from sgp.extras import import_extra

PIXELS = 64
CLASSES = 10
SPLIT_CLASSES = 2


def load_stream(settings: Digits, data: Path | None, seed: int) -> Stream:
    """Load the tasks; the images come with scikit-learn, so the folder is ignored.

    Pixels are standardized with one mean and one deviation, those of the training images.
    """
    parts, (inputs, heads) = _load_digits(), settings.get_shape()
    is_permuted = settings.kind == "permuted"
    names = [
        f"permutation {index}" if is_permuted else f"digits {SPLIT_CLASSES * index} and {SPLIT_CLASSES * index + 1}"
        for index in range(settings.tasks if is_permuted else len(heads))
    ]

    def make(index: int) -> Task:
        train, test = (_permute(part, seed, index) if is_permuted else _select(part, index) for part in parts)
        return make_task(names[index], 0 if is_permuted else index, train, test, settings, seed)

    return Stream(names, inputs, heads, make)


def _permute(part: Examples, seed: int, index: int) -> Examples:
    """Reorder the pixels; the order depends on seed and index only, so a longer stream begins with the shorter one."""
    order = torch.from_numpy(np.random.default_rng([seed, index]).permutation(PIXELS))
    return Examples(part.inputs[:, order], part.labels)


def _select(part: Examples, index: int) -> Examples:
    """Select the two digits of a task."""
    pair = part[torch.nonzero(part.labels // SPLIT_CLASSES == index).flatten()]
    return Examples(pair.inputs, pair.labels % SPLIT_CLASSES)


def _load_digits() -> tuple[Examples, Examples]:
    """Load training and test images; every fifth image of each class, in file order, is for testing."""
    pixels, classes = import_extra("sklearn.datasets").load_digits(return_X_y=True)
    inputs, labels = torch.from_numpy(pixels).float(), torch.from_numpy(classes).long()
    test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(CLASSES):
        test[torch.nonzero(labels == label)[::5]] = True
    inputs = (inputs - inputs[~test].mean()) / inputs[~test].std()
    return Examples(inputs[~test], labels[~test]), Examples(inputs[test], labels[test])
