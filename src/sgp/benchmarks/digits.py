"""Handwritten digits of 8 x 8 pixels, which come with scikit-learn, so that nothing is downloaded.

Permuted digits: every task has the same ten classes and the same images, with the pixels in another fixed order; only a
network that keeps one hidden representation per order of pixels can learn them all. Split digits: two classes a task.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from sgp.benchmarks import settings as check
from sgp.benchmarks.benchmark import Benchmark
from sgp.benchmarks.stream import Examples, Stream, Task, make_task
from sgp.extras import import_extra

PIXELS = 64
CLASSES = 10
SPLIT_CLASSES = 2
SPLIT_TASKS = CLASSES // SPLIT_CLASSES


@dataclass(frozen=True)
class Digits:
    """Handwritten digits of 8 x 8 pixels; they need no download."""

    kind: Literal["permuted", "split"] = "permuted"
    """Kind of tasks. permuted: all digits, with the pixels in a new order, and one head; split: two digits and a head
    for each task."""
    tasks: int = 10
    """Number of tasks to learn, at least 1; split digits have at most 5."""
    validation: float = 0.1
    """Fraction of each task's training images to hold out for validation, in [0, 1)."""
    validation_seed: int | None = None
    """Seed that draws the validation images; none: the run's seed."""

    def __post_init__(self) -> None:
        check.one_of("kind", self.kind, ("permuted", "split"))
        check.in_range("tasks", self.tasks, 1)
        check.share("validation", self.validation)
        check.seed("validation_seed", self.validation_seed)


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
    check.in_range("tasks", tasks, 1)
    check.in_range("seed", seed, 0)
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


BENCHMARK = Benchmark(
    name="digits",
    description="Handwritten digits of 8 x 8 pixels, permuted or split; needs no download and takes a minute.",
    settings=Digits,
    stream=load_stream,
    network="mlp",
    datasets=(),
)
