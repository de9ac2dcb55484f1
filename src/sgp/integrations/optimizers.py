"""Attach a memory to the optimizers of trainers that have more than one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from sgp.projection import GradientMemory, OptimizerHook


def attach_all(memory: GradientMemory, optimizers: Iterable[Optimizer], **options: Any) -> list[OptimizerHook]:
    """Attach a memory to the optimizers that have parameters of its model.

    If none has any, the ``ValueError`` of ``memory.attach`` is raised.

    Args:
        memory: Memory to attach.
        optimizers: Optimizers of a trainer.
        options: Options of ``memory.attach``.

    Returns:
        The hooks of the attached optimizers.
    """
    optimizers = list(optimizers)
    own = {id(p) for p in memory.model.parameters()}
    matching = [o for o in optimizers if any(id(p) in own for group in o.param_groups for p in group["params"])]
    return [memory.attach(optimizer, **options) for optimizer in matching or optimizers[:1]]
