"""Estimate what an update will cost before it is run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sgp.projection.batches import count_samples, get_mask
from sgp.projection.collect import collect_inputs
from sgp.projection.gram import STRIP, GramPath, InputGram
from sgp.projection.layer import ProtectedLayer

# FLOPs of a symmetric eigendecomposition with vectors over d^3, and of a thin SVD over n^2 d.
EIGH = 9
SVD = 11
# Dimension of the matrices that the speed of this machine is measured on.
PROBE = 384


@dataclass(frozen=True)
class LayerPlan:
    """Cost of one Gram matrix.

    Attributes:
        layers: Names of the layers that share it.
        dimension: Length of its rows, with the constant input of a protected bias.
        rows: Number of rows that will be added to it.
        bytes: The most bytes that it takes.
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
        bytes: The most bytes that the Gram matrices of one pass take, beside the model and its activations.
        seconds: Estimate from the FLOPs and a short measurement on this machine. With a batch it contains the model's
            own forward passes.
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
    paths: Mapping[str, GramPath],
    *,
    batch: Any = None,
    forward: Callable[[Any], Any] | None = None,
    mask: Callable[[Any], Tensor | None] | None = None,
) -> Plan:
    """Estimate the cost of an update.

    Args:
        model: As in an update.
        passes: Protected layers by pass over the data.
        samples: Number of samples of each layer.
        paths: How the inputs of each layer are collected.
        batch: Batch that shows how many rows each layer makes of a sample, and which layers share their input;
            without it one row of each sample is counted, and the model's own work is not.
        forward: As in an update.
        mask: As in an update.
    """
    layers = [layer for members in passes for layer in members]
    rows = {layer.name: float(samples[layer.name]) for layer in layers}
    first = {layer.name: layer.name for layer in layers}  # layer -> the first one that shares its Gram matrix
    seconds = 0.0
    if batch is not None:
        size = count_samples(batch, get_mask(batch, mask)) or 1
        for members in passes:  # as an update collects: layers of two passes do not share
            start = time.perf_counter()
            grams = _collect_batch(model, batch, members, paths, forward, mask)
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
    if batch is None:  # a batch has been through model and products both
        seconds += sum(plan.flops for plan in plans.values()) / product
    size_of_passes = [sum(plans[layer.name].bytes for layer in members if layer.name in plans) for members in passes]
    return Plan(list(plans.values()), len(passes), max(size_of_passes), seconds)


def _collect_batch(
    model: nn.Module,
    batch: Any,
    layers: Sequence[ProtectedLayer],
    paths: Mapping[str, GramPath],
    forward: Callable[[Any], Any] | None,
    mask: Callable[[Any], Tensor | None] | None,
) -> dict[str, InputGram]:
    everything: dict[str, int | None] = {layer.name: None for layer in layers}
    return collect_inputs(model, [batch], layers, forward=forward, samples=everything, paths=paths, mask=mask)


def _plan_layer(layers: Sequence[ProtectedLayer], rows: float) -> LayerPlan:
    """Estimate the cost of one Gram matrix and its decomposition."""
    names, groups, dimension = [layer.name for layer in layers], layers[0].groups, layers[0].dimension
    if layers[0].layer_type.is_lookup:
        return LayerPlan(names, dimension, round(rows), 8 * dimension, 0.0, 0.0)
    if rows < dimension:
        size, work = 4 * groups * rows * dimension, SVD * groups * rows**2 * dimension
        return LayerPlan(names, dimension, round(rows), round(size), 0.0, work)
    flops = float(groups * rows * dimension * (dimension + min(dimension, STRIP)))  # half of a symmetric matrix
    return LayerPlan(names, dimension, round(rows), 8 * groups * dimension**2, flops, EIGH * groups * dimension**3)


def _measure_speeds() -> tuple[float, float]:
    """Return the FLOPs a second of products in float32 and of decompositions in float64, on this machine, now."""
    probe = torch.eye(PROBE, device="cpu") + 1.0 / PROBE
    product = 2.0 * PROBE**3 / _time_work(lambda: probe @ probe)
    return product, EIGH * PROBE**3 / _time_work(lambda: torch.linalg.eigh(probe.double()))


def _time_work(work: Callable[[], object]) -> float:
    """Return the shorter time of two runs: the first one warms up."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
