"""Permuted digits: handwritten digits of 8 x 8 pixels, with the pixels in another fixed order for each task.

The images come with scikit-learn, so nothing is downloaded. Every task has the same ten classes and the same images;
only a network that keeps one hidden representation per order of pixels can hold them all.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

PIXELS = 64
CLASSES = 10


@dataclass(frozen=True, eq=False)
class Task:
    """One task of a stream.

    Attributes:
        name: what tables call it.
        train_inputs: [n, 64], float32.
        train_labels: [n], int64.
        test_inputs: [m, 64], float32.
        test_labels: [m], int64.
    """

    name: str
    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor


def permuted_digits(tasks: int = 10, seed: int = 0) -> Iterator[Task]:
    """The stream of tasks: the digits under one random order of pixels after another.

    The order depends on the seed and the task's index alone, so a longer stream begins with the shorter one. Pixels are
    standardised with one mean and one deviation, those of the training images.

    Args:
        tasks: how many.
        seed: which orders of pixels.
    """
    if tasks < 1:
        raise ValueError(f"tasks must be at least 1, got {tasks}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    base = _digits()
    return (_permuted(base, index, seed) for index in range(tasks))


def _permuted(base: Task, index: int, seed: int) -> Task:
    order = torch.from_numpy(np.random.default_rng([seed, index]).permutation(PIXELS))
    return Task(
        name=f"permutation {index}",
        train_inputs=base.train_inputs[:, order],
        train_labels=base.train_labels,
        test_inputs=base.test_inputs[:, order],
        test_labels=base.test_labels,
    )


def _digits() -> Task:
    """The images in their own order of pixels; every fifth image of each class, in file order, is for testing."""
    # Imported here: scikit-learn is no dependency of the core, and it takes a second.
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    inputs = torch.from_numpy(pixels).float()
    labels = torch.from_numpy(classes).long()
    test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(CLASSES):
        test[torch.nonzero(labels == label)[::5]] = True
    mean, deviation = inputs[~test].mean(), inputs[~test].std()
    inputs = (inputs - mean) / deviation
    return Task("digits", inputs[~test], labels[~test], inputs[test], labels[test])
