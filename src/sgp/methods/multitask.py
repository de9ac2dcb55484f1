"""Multitask: all tasks learned at once in one network, the oracle that other methods are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sgp.methods.method import Batch, NoSettings
from sgp.methods.supervised import Joint


class Multitask(Joint[NoSettings]):
    """Plain training on all tasks in random turns: the mean loss of a batch, through the head of its task.

    A batch has examples of one task only. So BatchNorm meets in training what it meets at test, where a batch is of one
    task too.
    """

    name = "multitask"
    description = "all tasks at once in one network: the oracle"
    Settings = NoSettings
    # Of all tasks, to the end.
    keeps_data = True

    def attach(self, optimizer: Optimizer) -> None:
        """Nothing acts on the optimizer."""

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        """Nothing comes after the tasks."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to load."""
