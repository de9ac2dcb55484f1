"""Finetuning: one task after another with nothing done about forgetting, the floor of every comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sgp.methods.method import Batch, Method, NoSettings


class Finetune(Method[NoSettings]):
    """Does nothing."""

    name = "finetune"
    description = "plain training of one task after another: the floor"
    Settings = NoSettings

    def attach(self, optimizer: Optimizer) -> None:
        """Nothing acts on the optimizer."""

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        """Nothing is kept of a task."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to load."""
