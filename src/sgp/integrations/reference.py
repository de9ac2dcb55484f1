"""Weights before a task, to measure drift and realign heads with, also after training resumes from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from sgp.heads import check_heads
from sgp.projection import GradientMemory
from sgp.projection.anchor import Anchor
from sgp.projection.update import check_not_single_batch

Heads = nn.Linear | Iterable[nn.Linear]


def list_heads(heads: Heads, features: Callable[[Any], Tensor] | None) -> list[nn.Linear]:
    """Return the heads to realign as a list.

    Raises:
        ValueError: There are heads, but no function that computes their inputs.
    """
    if features is None and heads:
        raise ValueError("heads= needs features=, a function that returns the inputs of the heads for a batch")
    return [heads] if isinstance(heads, nn.Linear) else list(heads)


def list_batches(check: Iterable[Any]) -> list[Any]:
    """Return the batches to check as a list. A single batch is refused."""
    check_not_single_batch(check)
    return list(check)


def find_reference(memory: GradientMemory, heads: Iterable[nn.Linear], check: Iterable[Any]) -> Anchor | None:
    """Return the weights as of the last update, if heads will be realigned or batches checked.

    Raises:
        RuntimeError: The weights are not available.
        ValueError: A head is protected by the memory.
    """
    heads = list(heads)
    if not heads and not (check and memory.tasks):
        return None
    check_heads(memory.model, heads, memory.anchor)
    return memory.anchor


def dump_reference(reference: Anchor | None) -> dict[str, Any] | None:
    """Return a reference as tensors and plain values, for a checkpoint."""
    return None if reference is None else {"tensors": dict(reference), "protected": sorted(reference.protected)}


def load_reference(state: Mapping[str, Any] | None) -> Anchor | None:
    """Return the reference of a checkpoint."""
    return None if state is None else Anchor(state["tensors"], frozenset(state["protected"]))
