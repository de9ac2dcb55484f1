"""A stream of tasks: what every benchmark gives, and how its validation images are drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs with their labels.

    Attributes:
        stored: [n, ...], as the data set has them.
        labels: [n], int64, from 0 inside the task.
        prepare: makes of stored inputs what the network takes; without it they are that already.
    """

    stored: Tensor
    labels: Tensor
    prepare: Callable[[Tensor], Tensor] | None = None

    @cached_property
    def inputs(self) -> Tensor:
        """[n, ...], float32, as the network takes them; made when first asked for, since images are stored as bytes."""
        return self.stored if self.prepare is None else self.prepare(self.stored)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Tensor | slice) -> Examples:
        return Examples(self.stored[rows], self.labels[rows], self.prepare)


@dataclass(frozen=True, eq=False)
class Task:
    """One task of a stream.

    Attributes:
        name: what tables call it.
        head: which head of the network answers for it.
        train: what is learned from.
        validation: drawn from the training data; says when to stop.
        test: what accuracy is measured on.
    """

    name: str
    head: int
    train: Examples
    validation: Examples
    test: Examples


@dataclass(frozen=True, eq=False)
class Stream:
    """Tasks in their order, each made when it is asked for, so that a large data set need not be in memory as floats.

    Attributes:
        names: of the tasks, in the order in which they are learned.
        inputs: shape of one input.
        heads: number of classes of each head. One head for many tasks is shared by them.
        make: gives the task at a position.
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


def hold_out(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples]:
    """Training and validation examples: the first `share` of a random order is for validation, as published.

    The order is the one that scikit-learn's `shuffle` gives for this seed, since the published splits come from it.
    """
    order = np.arange(len(examples))
    np.random.RandomState(seed).shuffle(order)
    held = int(share * len(examples))
    rows = torch.from_numpy(order)
    return examples[rows[held:]], examples[rows[:held]]
