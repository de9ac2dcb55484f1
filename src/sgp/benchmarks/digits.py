"""Handwritten digits of 8 x 8 pixels, which come with scikit-learn, so that nothing is downloaded.

Permuted digits: every task has the same ten classes and the same images, with the pixels in another fixed order; only a
network that keeps one hidden representation per order of pixels can learn them all. Split digits: two classes a task.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sgp.benchmarks.settings import Digits
from sgp.benchmarks.stream import Examples, Stream, Task, make_task
from sgp.extras import import_extra
from sgp.settings import Range, check_number

PIXELS = 64
CLASSES = 10
SPLIT_CLASSES = 2
SPLIT_TASKS = CLASSES // SPLIT_CLASSES


def load_stream(settings: Digits, data: Path | None, seed: int) -> Stream:
    """Load the tasks; the images come with scikit-learn, so the folder is ignored."""
    whole = permute_digits(settings.tasks, seed) if settings.kind == "permuted" else split_digits(settings.tasks)

    def make(position: int) -> Task:
        task = whole[position]
        return make_task(task.name, task.head, task.train, task.test, settings, seed)

    return replace(whole, make=make)


def permute_digits(tasks: int = 10, seed: int = 0) -> Stream:
    """Load the digits in one random order of pixels after another, without validation images.

    The order depends on the seed and the task's index only, so a longer stream begins with the shorter one. Pixels are
    standardized with one mean and one deviation, those of the training images.

    Args:
        tasks: Number of tasks.
        seed: Seed that draws the orders of pixels.
    """
    check_number("tasks", tasks, Range(low=1))
    check_number("seed", seed, Range(low=0))
    train, test = _load_digits()

    def make(index: int) -> Task:
        order = torch.from_numpy(np.random.default_rng([seed, index]).permutation(PIXELS))
        own, held = (Examples(part.inputs[:, order], part.labels) for part in (train, test))
        return Task(names[index], 0, own, own[:0], held)

    names = [f"permutation {index}" for index in range(tasks)]
    return Stream(names, (PIXELS,), [CLASSES], make)


def split_digits(tasks: int = SPLIT_TASKS) -> Stream:
    """Load digits 0 and 1, then 2 and 3, and so on, each pair with a head of its own, without validation images."""
    tasks = min(tasks, SPLIT_TASKS)
    parts = _load_digits()

    def make(index: int) -> Task:
        pairs = (part[torch.nonzero(part.labels // SPLIT_CLASSES == index).flatten()] for part in parts)
        train, test = (Examples(pair.inputs, pair.labels % SPLIT_CLASSES) for pair in pairs)
        return Task(names[index], index, train, train[:0], test)

    names = [f"digits {SPLIT_CLASSES * index} and {SPLIT_CLASSES * index + 1}" for index in range(tasks)]
    return Stream(names, (PIXELS,), [SPLIT_CLASSES] * tasks, make)


def _load_digits() -> tuple[Examples, Examples]:
    """Load training and test images; every fifth image of each class, in file order, is for testing."""
    pixels, classes = import_extra("sklearn.datasets").load_digits(return_X_y=True)
    inputs, labels = torch.from_numpy(pixels).float(), torch.from_numpy(classes).long()
    test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(CLASSES):
        test[torch.nonzero(labels == label)[::5]] = True
    inputs = (inputs - inputs[~test].mean()) / inputs[~test].std()
    return Examples(inputs[~test], labels[~test]), Examples(inputs[test], labels[test])
