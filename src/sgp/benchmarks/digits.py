"""Handwritten digits of 8 x 8 pixels, which come with scikit-learn, so that nothing is downloaded.

Permuted digits: every task has the same ten classes and the same images, with the pixels in another fixed order; only a
network that keeps one hidden representation per order of pixels can hold them all. Split digits: two classes a task.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from sgp.benchmarks.datasets.extra import need
from sgp.benchmarks.settings.digits import Digits
from sgp.benchmarks.stream import Examples, Stream, Task, hold_out
from sgp.settings import Range, check_number

PIXELS = 64
CLASSES = 10
SPLIT_CLASSES = 2
SPLIT_TASKS = CLASSES // SPLIT_CLASSES


def stream(settings: Digits, data: Path | None, seed: int) -> Stream:
    """The tasks; the images lie in scikit-learn, so that the folder is not looked at."""
    held_by = seed if settings.validation_seed is None else settings.validation_seed

    def held_out(task: Task) -> Task:
        train, validation = hold_out(task.train, settings.validation, held_by)
        return Task(task.name, task.head, train, validation, task.test)

    whole = permuted_digits(settings.tasks, seed) if settings.kind == "permuted" else split_digits(settings.tasks)
    return Stream(whole.names, whole.inputs, whole.heads, lambda position: held_out(whole[position]))


def permuted_digits(tasks: int = 10, seed: int = 0) -> Stream:
    """The digits under one random order of pixels after another; no image is held out for validation.

    The order depends on the seed and the task's index alone, so a longer stream begins with the shorter one. Pixels are
    standardised with one mean and one deviation, those of the training images.

    Args:
        tasks: how many.
        seed: which orders of pixels.
    """
    check_number("tasks", tasks, Range(low=1))
    check_number("seed", seed, Range(low=0))
    train, test = _digits()

    def permuted(index: int) -> Task:
        order = torch.from_numpy(np.random.default_rng([seed, index]).permutation(PIXELS))
        ordered = Examples(train.inputs[:, order], train.labels)
        return Task(names[index], 0, ordered, ordered[:0], Examples(test.inputs[:, order], test.labels))

    names = [f"permutation {index}" for index in range(tasks)]
    return Stream(names, (PIXELS,), [CLASSES], permuted)


def split_digits(tasks: int = SPLIT_TASKS) -> Stream:
    """Digits 0 and 1, then 2 and 3, and so on, each pair with a head of its own; no image is held out."""
    tasks = min(tasks, SPLIT_TASKS)
    train, test = _digits()

    def split(index: int) -> Task:
        def part(examples: Examples) -> Examples:
            mine = examples[torch.nonzero(examples.labels // SPLIT_CLASSES == index).flatten()]
            return Examples(mine.inputs, mine.labels % SPLIT_CLASSES)

        whole = part(train)
        return Task(names[index], index, whole, whole[:0], part(test))

    names = [f"digits {SPLIT_CLASSES * index} and {SPLIT_CLASSES * index + 1}" for index in range(tasks)]
    return Stream(names, (PIXELS,), [SPLIT_CLASSES] * tasks, split)


def _digits() -> tuple[Examples, Examples]:
    """Training and test images; every fifth image of each class, in file order, is for testing."""
    load_digits: Callable[..., tuple[np.ndarray, np.ndarray]] = need("sklearn.datasets").load_digits
    pixels, classes = load_digits(return_X_y=True)
    inputs = torch.from_numpy(pixels).float()
    labels = torch.from_numpy(classes).long()
    test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(CLASSES):
        test[torch.nonzero(labels == label)[::5]] = True
    mean, deviation = inputs[~test].mean(), inputs[~test].std()
    inputs = (inputs - mean) / deviation
    return Examples(inputs[~test], labels[~test]), Examples(inputs[test], labels[test])
