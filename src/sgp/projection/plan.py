"""What an update will cost, said before it is begun."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sgp.projection.collect import collect_inputs, count_samples, get_mask
from sgp.projection.gram import STRIP
from sgp.projection.layout import Guard

# Of a symmetric eigendecomposition with vectors, and of a thin SVD, in multiply-adds over d^3 and n^2 d.
EIGH = 9
SVD = 11
# What the speed of this machine is measured on.
PROBE = 384


@dataclass(frozen=True)
class LayerPlan:
    """What one statistic costs.

    Attributes:
        layers: that share it.
        dimension: of its rows, with the constant of a protected bias.
        rows: how many it will take in.
        bytes: that it holds at most.
        flops: of its products.
        decomposition: flops of its decomposition.
    """

    layers: list[str]
    dimension: int
    rows: int
    bytes: int
    flops: float
    decomposition: float


@dataclass(frozen=True)
class Plan:
    """What an update costs.

    Attributes:
        layers: by statistic.
        passes: over the data.
        bytes: that the statistics of one pass hold at most, beside the model and its activations.
        seconds: estimated from the flops and a short measurement on this machine; with a batch, the passes of the data
            through the model are in it.
    """

    layers: list[LayerPlan]
    passes: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        lines = [
            f"about {self.seconds:.1f} s and {self.bytes / 1e6:.1f} MB in {self.passes} pass{'es' * (self.passes > 1)}",
            f"{'rows':>10} {'dimension':>9} {'MB':>8} {'GFLOP':>8}  layers",
        ]
        for layer in self.layers:
            gflop = (layer.flops + layer.decomposition) / 1e9
            names = ", ".join(layer.layers)
            lines.append(f"{layer.rows:>10} {layer.dimension:>9} {layer.bytes / 1e6:>8.1f} {gflop:>8.1f}  {names}")
        return "\n".join(lines)


def plan(
    model: nn.Module,
    passes: Sequence[Sequence[Guard]],
    dimensions: Mapping[str, tuple[int, int]],
    samples: Mapping[str, int],
    *,
    batch: Any = None,
    forward: Callable[[Any], Any] | None = None,
    mask: Callable[[Any], Tensor | None] | None = None,
) -> Plan:
    """Count and estimate.

    Args:
        model: as in an update.
        passes: its guards, in the lots that are gathered together.
        dimensions: groups and dimension of each guard.
        samples: of each guard.
        batch: shows how many rows each layer makes of a sample, and which layers share; without it one row of each
            sample is counted, and the model's own work is not.
        forward: as in an update.
        mask: as in an update.
    """
    guards = [guard for members in passes for guard in members]
    rows = {guard.name: float(samples[guard.name]) for guard in guards}
    owner = {guard.name: guard.name for guard in guards}
    through = 0.0
    if batch is not None:
        size = count_samples(batch, get_mask(batch, mask)) or 1
        for members in passes:  # as an update gathers: what one holds is bounded, and layers of two do not share
            names = [guard.name for guard in members]
            everything, exact = dict.fromkeys(names), dict.fromkeys(names, False)
            start = time.perf_counter()
            found = collect_inputs(
                model, [batch], members, forward=forward, samples=everything, precise=exact, mask=mask
            )
            through += (time.perf_counter() - start) / size * max(samples[name] for name in names)
            first: dict[int, str] = {}
            for name in names:
                rows[name] *= found[name].count / size if name in found else 0.0
                owner[name] = first.setdefault(id(found[name]), name) if name in found else name
    lookups = {guard.name for guard in guards if guard.layer_type.is_lookup}
    layers = {
        name: _layer([other for other in owner if owner[other] == name], *dimensions[name], rows[name], name in lookups)
        for name in dict.fromkeys(owner.values())
    }
    product, decomposition = _speeds()
    seconds = sum(layer.decomposition for layer in layers.values()) / decomposition
    # A batch has been through model and products both.
    seconds += through if batch is not None else sum(layer.flops for layer in layers.values()) / product
    held = [sum(layers[guard.name].bytes for guard in members if guard.name in layers) for members in passes]
    return Plan(list(layers.values()), len(passes), max(held), seconds)


def _layer(layers: list[str], groups: int, dimension: int, rows: float, is_lookup: bool) -> LayerPlan:
    if is_lookup:
        return LayerPlan(layers, dimension, round(rows), 8 * dimension, 0.0, 0.0)
    if rows < dimension:
        size, work = 4 * groups * rows * dimension, SVD * groups * rows**2 * dimension
        return LayerPlan(layers, dimension, round(rows), round(size), 0.0, work)
    flops = float(groups * rows * dimension * (dimension + min(dimension, STRIP)))  # half of a symmetric matrix
    return LayerPlan(layers, dimension, round(rows), 8 * groups * dimension**2, flops, EIGH * groups * dimension**3)


def _speeds() -> tuple[float, float]:
    """Flops a second of products in float32 and of decompositions in float64, on this machine, now."""
    probe = torch.eye(PROBE) + 1.0 / PROBE
    return 2.0 * PROBE**3 / _seconds(lambda: probe @ probe), EIGH * PROBE**3 / _seconds(
        lambda: torch.linalg.eigh(probe.double())
    )


def _seconds(work: Callable[[], object]) -> float:
    """The shorter of two runs: the first one warms up."""
    taken = []
    for _ in range(2):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)
