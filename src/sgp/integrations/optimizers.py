"""Trainers that have more than one optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from sgp.projection import GradientMemory, OptimizerHook


def attach_all(memory: GradientMemory, optimizers: Iterable[Optimizer], **options: Any) -> list[OptimizerHook]:
    """Attach a memory to those optimizers that hold parameters of its model.

    Raises:
        ValueError: none does.
    """
    optimizers = list(optimizers)
    ours = {id(p) for p in memory.model.parameters()}
    holders = [o for o in optimizers if any(id(p) in ours for group in o.param_groups for p in group["params"])]
    # Where none holds any, the first says so.
    return [memory.attach(optimizer, **options) for optimizer in holders or optimizers[:1]]
