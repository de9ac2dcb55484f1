"""Streams of tasks, which every benchmark provides, and the split of their training examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sgp.benchmarks.datasets.images import ImageSet


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs with their labels.

    Attributes:
        stored: Inputs as the data set stores them, [n, ...].
        labels: Labels within the task, from 0: [n], int64.
        prepare: Function that converts stored inputs to the network's inputs; None if they need no conversion.
    """

    stored: Tensor
    labels: Tensor
    prepare: Callable[[Tensor], Tensor] | None = None

    @cached_property
    def inputs(self) -> Tensor:
        """The network's inputs, [n, ...]; converted on first access, since images are stored as bytes."""
        return self.stored if self.prepare is None else self.prepare(self.stored)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor | slice) -> Examples:
        return Examples(self.stored[rows], self.labels[rows], self.prepare)


@dataclass(frozen=True, eq=False)
class Task:
    """One task of a stream.

    Attributes:
        name: Name of the task in tables.
        head: Index of the network's head for the task.
        train: Training examples.
        validation: Examples held out of the training data, by which training is stopped.
        test: Examples on which accuracy is measured.
    """

    name: str
    head: int
    train: Examples
    validation: Examples
    test: Examples


@dataclass(frozen=True, eq=False)
class Stream:
    """Tasks in training order, each created on access, so that a large data set never is in memory as floats.

    Attributes:
        names: Names of the tasks, in training order.
        inputs: Shape of one input.
        heads: Number of classes of each head. A single head is shared by all tasks.
        make: Function that creates the task at a position.
    """

    names: Sequence[str]
    inputs: tuple[int, ...]
    heads: Sequence[int]
    make: Callable[[int], Task]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, position: int) -> Task:
        if not 0 <= position < len(self.names):
            raise IndexError(f"the stream has {len(self.names)} tasks, from 0; got {position}")
        return self.make(position)


class ValidationSettings(Protocol):
    """Settings of a benchmark that say how validation examples are drawn."""

    @property
    def validation(self) -> float:
        """Fraction of the training examples to hold out."""

    @property
    def validation_seed(self) -> int | None:
        """Seed of the draw; None for the run's seed."""


@dataclass(frozen=True)
class ClassGroup:
    """The classes of one task.

    Attributes:
        name: Name of the task.
        head: Index of the task's head.
        classes: Labels in the data set; the label within the task is the position in this sequence.
    """

    name: str
    head: int
    classes: Sequence[int]


def hold_out(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples]:
    """Split examples at random into training and validation examples, as the published code does.

    The first `share` of the random order is for validation. The order is the one of scikit-learn's `shuffle` with this
    seed, by which the published splits were made.
    """
    order = np.arange(len(examples))
    np.random.RandomState(seed).shuffle(order)
    count = int(share * len(examples))
    rows = torch.from_numpy(order)
    return examples[rows[count:]], examples[rows[:count]]


def make_task(name: str, head: int, train: Examples, test: Examples, settings: ValidationSettings, seed: int) -> Task:
    """Create a task whose validation examples are held out of the training examples.

    Args:
        name: Name of the task.
        head: Index of the task's head.
        train: Training examples, validation examples included.
        test: Test examples.
        settings: Settings of the benchmark.
        seed: Seed of the run, used unless the settings have a seed of their own.
    """
    own = settings.validation_seed
    return Task(name, head, *hold_out(train, settings.validation, seed if own is None else own), test)


def split_classes(
    images: ImageSet,
    groups: Sequence[ClassGroup],
    shape: tuple[tuple[int, ...], Sequence[int]],
    prepare: Callable[[Tensor], Tensor],
    settings: ValidationSettings,
    seed: int,
) -> Stream:
    """Create a stream whose tasks are groups of an image set's classes.

    Args:
        images: Images of all classes.
        groups: Classes of each task, in training order.
        shape: Shape of one input, and the number of classes of each head.
        prepare: Function that converts stored images to inputs.
        settings: Settings of the benchmark.
        seed: Seed of the run.
    """

    def select(pixels: Tensor, labels: Tensor, group: ClassGroup) -> Examples:
        rows, places = torch.nonzero(labels.unsqueeze(1) == torch.tensor(group.classes), as_tuple=True)
        return Examples(pixels[rows], places, prepare)

    def make(position: int) -> Task:
        group = groups[position]
        train = select(images.train, images.train_labels, group)
        test = select(images.test, images.test_labels, group)
        return make_task(group.name, group.head, train, test, settings, seed)

    return Stream([group.name for group in groups], *shape, make)


def normalize(pixels: Tensor, mean: Tensor | float, deviation: Tensor | float) -> Tensor:
    """Scale bytes to [0, 1] and standardize them."""
    return (pixels.float() / 255 - mean) / deviation
