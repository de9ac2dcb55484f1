"""Estimate what an update will cost before it is run."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sgp.projection.collect import collect_inputs, count_samples, get_mask
from sgp.projection.gram import STRIP
from sgp.projection.layer import ProtectedLayer

# FLOPs of a symmetric eigendecomposition with vectors divided by d^3, and of a thin SVD divided by n^2 d.
EIGH = 9
SVD = 11
# Dimension of the matrices with which the speed of the machine is measured.
PROBE = 384


@dataclass(frozen=True)
class LayerPlan:
    """Cost of one Gram matrix.

    Attributes:
        layers: Names of the layers that share the matrix.
        dimension: Length of its rows, including the constant input of a protected bias.
        rows: Number of rows that will be added to it.
        bytes: Largest number of bytes that it takes.
        flops: FLOPs of its products.
        decomposition: FLOPs of its decomposition.
    """

    layers: list[str]
    dimension: int
    rows: int
    bytes: int
    flops: float
    decomposition: float


@dataclass(frozen=True)
class Plan:
    """Cost of an update.

    Attributes:
        layers: Cost of each Gram matrix.
        passes: Number of passes over the data.
        bytes: Largest number of bytes that the Gram matrices of one pass take, without the model and its activations.
        seconds: Estimate from the FLOPs and a short measurement on this machine. With a batch it includes the forward
            passes of the model.
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


def plan_update(
    model: nn.Module,
    passes: Sequence[Sequence[ProtectedLayer]],
    samples: Mapping[str, int],
    *,
    batch: Any = None,
    forward: Callable[[Any], Any] | None = None,
    mask: Callable[[Any], Tensor | None] | None = None,
) -> Plan:
    """Estimate the cost of an update.

    Args:
        model: Protected model.
        passes: Protected layers by pass over the data.
        samples: Number of samples of each layer.
        batch: Batch that shows how many rows a sample has in each layer, and which layers share their input. Without
            it one row per sample is counted, and forward passes are not.
        forward: As in ``memory.update``.
        mask: As in ``memory.update``.

    Returns:
        The estimate.
    """
    layers = [layer for members in passes for layer in members]
    rows = {layer.name: float(samples[layer.name]) for layer in layers}
    first = {layer.name: layer.name for layer in layers}  # layer -> the first one that shares its Gram matrix
    seconds = 0.0
    if batch is not None:
        size = count_samples(batch, get_mask(batch, mask)) or 1
        everything, exact = dict.fromkeys(rows, None), dict.fromkeys(rows, False)
        for members in passes:  # as in an update, layers of two passes do not share
            start = time.perf_counter()
            grams = collect_inputs(
                model, [batch], members, forward=forward, samples=everything, precise=exact, mask=mask
            )
            seconds += (time.perf_counter() - start) / size * max(samples[layer.name] for layer in members)
            seen: dict[int, str] = {}
            for layer in members:
                gram = grams.get(layer.name)
                rows[layer.name] *= gram.count / size if gram is not None else 0.0
                first[layer.name] = layer.name if gram is None else seen.setdefault(id(gram), layer.name)
    sharing: dict[str, list[ProtectedLayer]] = {}
    for layer in layers:
        sharing.setdefault(first[layer.name], []).append(layer)
    plans = {name: _plan_layer(members, rows[name]) for name, members in sharing.items()}
    product, decomposition = _measure_speeds()
    seconds += sum(plan.decomposition for plan in plans.values()) / decomposition
    if batch is None:  # the time of a batch includes the products
        seconds += sum(plan.flops for plan in plans.values()) / product
    size_of_passes = [sum(plans[layer.name].bytes for layer in members if layer.name in plans) for members in passes]
    return Plan(list(plans.values()), len(passes), max(size_of_passes), seconds)


def _plan_layer(layers: Sequence[ProtectedLayer], rows: float) -> LayerPlan:
    """Return the estimated cost of one Gram matrix and its decomposition."""
    names, groups, dimension = [layer.name for layer in layers], layers[0].groups, layers[0].dimension
    if layers[0].layer_type.is_lookup:
        return LayerPlan(names, dimension, round(rows), 8 * dimension, 0.0, 0.0)
    if rows < dimension:
        size, work = 4 * groups * rows * dimension, SVD * groups * rows**2 * dimension
        return LayerPlan(names, dimension, round(rows), round(size), 0.0, work)
    flops = float(groups * rows * dimension * (dimension + min(dimension, STRIP)))  # half of a symmetric matrix
    return LayerPlan(names, dimension, round(rows), 8 * groups * dimension**2, flops, EIGH * groups * dimension**3)


def _measure_speeds() -> tuple[float, float]:
    """Return the FLOPs per second of products in float32 and of decompositions in float64 on this machine."""
    probe = torch.eye(PROBE, device="cpu") + 1.0 / PROBE
    product = 2.0 * PROBE**3 / _time_work(lambda: probe @ probe)
    return product, EIGH * PROBE**3 / _time_work(lambda: torch.linalg.eigh(probe.double()))


def _time_work(work: Callable[[], object]) -> float:
    """Return the shorter time of two runs, of which the first is a warm-up."""
    return min(timeit.repeat(work, number=1, repeat=2))
