"""Metrics of a memory for the logger of a trainer, by groups of layers: ``sgp/METRIC/GROUP``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from torch import Tensor

from sgp.projection import GradientMemory
from sgp.projection.capacity import generalize_name, merge_names
from sgp.projection.update_report import UpdateReport


def collect_capacity(memory: GradientMemory) -> dict[str, float]:
    """Return ``sgp/free``, the mean free capacity of each group of layers."""
    return _reduce(memory, "free", [(layer.layer, layer.free) for layer in memory.capacity().layers], fmean)


def collect_update(memory: GradientMemory, report: UpdateReport) -> dict[str, float]:
    """Return ``sgp/free`` after an update, and ``sgp/captured``, the mean share of input energy that bases capture."""
    captured = [
        (name, update.captured) for update in report.layers if update.captured is not None for name in update.layers
    ]
    return collect_capacity(memory) | _reduce(memory, "captured", captured, fmean)


def collect_changes(
    memory: GradientMemory,
    batches: Sequence[Any],
    *,
    forward: Callable[[Any], Any] | None,
    mask: Callable[[Any], Tensor | None] | None = None,
    reference: Mapping[str, Tensor] | None = None,
) -> dict[str, float]:
    """Compare the model with its weights as of the last update on some batches, with arguments as in ``memory.check``.

    Returns:
        ``sgp/output_drift`` of the model, and for each group the largest ``sgp/leak`` and the mean ``sgp/drift``.
    """
    checks = [memory.check(batch, forward=forward, mask=mask, reference=reference) for batch in batches]
    layers = [layer for check in checks for layer in check.layers]
    return {
        "sgp/output_drift": fmean(check.drift for check in checks),
        **_reduce(memory, "leak", [(layer.layer, layer.leak) for layer in layers], max),
        **_reduce(memory, "drift", [(layer.layer, layer.drift) for layer in layers], fmean),
    }


def _reduce(
    memory: GradientMemory, metric: str, values: Iterable[tuple[str, float]], reduce: Callable[[list[float]], float]
) -> dict[str, float]:
    """Reduce the values of the layers of each group to one value."""
    group_of = name_groups(memory)
    grouped: dict[str, list[float]] = {}
    for layer, value in values:
        grouped.setdefault(group_of[layer], []).append(value)
    return {f"sgp/{metric}/{group}": reduce(members) for group, members in grouped.items()}


def name_groups(memory: GradientMemory) -> dict[str, str]:
    """Return the name of each layer's group, which contains the layers of one row of ``memory.summary()``.

    The names of these layers differ in numbers only, and their inputs have the same dimension. Numbers that differ are
    replaced by ``all``, since not every logger accepts a star. If two groups would have the same name, the dimension is
    appended.
    """
    kinds: dict[tuple[str, int], list[str]] = {}
    for layer in memory.capacity().layers:
        kinds.setdefault((generalize_name(layer.layer), layer.dimension), []).append(layer.layer)
    merged = {kind: merge_names(members) for kind, members in kinds.items()}
    uses = Counter(merged.values())
    groups: dict[str, str] = {}
    for kind, members in kinds.items():
        name = merged[kind] if uses[merged[kind]] == 1 else f"{merged[kind]}.{kind[1]}"
        groups |= dict.fromkeys(members, name.replace("*", "all").replace(":", ".").strip("()"))
    return groups
