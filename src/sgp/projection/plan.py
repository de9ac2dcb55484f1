"""Estimate what an update will cost before it is run."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sgp.projection.batches import count_samples, get_mask
from sgp.projection.capacity import format_bytes, generalize_name, merge_names
from sgp.projection.collect import collect_inputs
from sgp.projection.gram import STRIP, GramPath, Kind
from sgp.projection.layer import ProtectedLayer
from sgp.projection.sketch import STRIP as WIDE_STRIP
from sgp.projection.sketch import count_buffer_rows
from sgp.projection.update import UpdatePlan, bound_bytes

# FLOPs of a symmetric eigendecomposition with vectors divided by d^3, and of a thin SVD divided by n^2 d.
EIGH = 9
SVD = 11
# FLOPs of subspace iteration in float32 divided by d^3, where a quarter of all directions is needed.
ITERATION = 2
# Dimension of the matrices with which the speed of the machine is measured.
PROBE = 384


@dataclass(frozen=True)
class LayerPlan:
    """Cost of one Gram matrix.

    Attributes:
        layers: Names of the layers that share the matrix.
        path: How it is collected; a sketch costs at most what is given here.
        dimension: Length of its rows, including the constant input of a protected bias.
        rows: Number of rows that will be added to it.
        bytes: Largest number of bytes that it takes.
        flops: FLOPs of products in float32, including a decomposition by products.
        decomposition: FLOPs of its decomposition in float64.
        forward: FLOPs of the layers' own products with these rows.
    """

    layers: list[str]
    path: Kind
    dimension: int
    rows: int
    bytes: int
    flops: float
    decomposition: float
    forward: float


@dataclass(frozen=True)
class Plan:
    """Cost of an update.

    Attributes:
        layers: Cost of each Gram matrix.
        passes: Number of passes over the data.
        bytes: Largest number of bytes that the Gram matrices of one pass take, without the model and its activations.
        seconds: Estimate from the FLOPs and a short measurement on this machine; None for a model on the meta device.
            With a batch it includes the forward passes of the model.
    """

    layers: list[LayerPlan]
    passes: int
    bytes: int
    seconds: float | None

    @property
    def total_bytes(self) -> int:
        """The most bytes that all Gram matrices take together, as they would in a single pass."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def relative_flops(self) -> float:
        """FLOPs of the Gram matrices over those of one forward pass through the protected layers."""
        return sum(layer.flops + layer.decomposition for layer in self.layers) / sum(la.forward for la in self.layers)

    def __str__(self) -> str:
        time = "" if self.seconds is None else f"about {self.seconds:.1f} s and "
        lines = [
            f"{time}at most {format_bytes(self.bytes)} in {self.passes} pass{'es' * (self.passes > 1)} "
            f"({format_bytes(self.total_bytes)} in all), {self.relative_flops:.2f} times the FLOPs of a forward pass",
            f"{'number':>6} {'rows':>10} {'dimension':>9} {'path':>8} {'MB':>9} {'GFLOP':>10}  layers",
        ]
        kinds: dict[Hashable, list[LayerPlan]] = {}
        for layer in self.layers:  # one line for layers whose names differ in numbers only
            pattern = tuple(generalize_name(name) for name in layer.layers)
            kinds.setdefault((pattern, layer.dimension, layer.rows, layer.path), []).append(layer)
        for layers in kinds.values():
            size = sum(layer.bytes for layer in layers) / 1e6
            gflop = sum(layer.flops + layer.decomposition for layer in layers) / 1e9
            first = layers[0]
            names = ", ".join(merge_names(list(group)) for group in zip(*(la.layers for la in layers), strict=True))
            lines.append(
                f"{len(layers):>6} {first.rows:>10} {first.dimension:>9} {first.path:>8} {size:>9.1f} {gflop:>10.1f}  "
                f"{names}"
            )
        return "\n".join(lines)


def plan_update(
    model: nn.Module,
    plan: UpdatePlan,
    samples: Mapping[str, int],
    *,
    batch: Any = None,
    forward: Callable[[Any], Any] | None = None,
    mask: Callable[[Any], Tensor | None] | None = None,
) -> Plan:
    """Estimate the cost of an update.

    Args:
        model: Protected model.
        plan: Passes of the update.
        samples: Number of samples of each layer.
        batch: Batch that shows how many rows a sample has in each layer, and which layers share their input. Without
            it one row per sample is counted, and forward passes are not. For a model on the meta device it is a batch
            of meta tensors, of which all positions count.
        forward: As in ``memory.update``.
        mask: As in ``memory.update``.

    Returns:
        The estimate.
    """
    passes, paths = plan.passes, plan.paths
    layers = [layer for members in passes for layer in members]
    rows = {layer.name: float(samples[layer.name]) for layer in layers}
    first = {layer.name: layer.name for layer in layers}  # layer -> the first one that shares its Gram matrix
    seconds = 0.0
    if batch is not None:
        size = count_samples(batch, get_mask(batch, mask)) or 1
        for members in passes:  # as in an update, layers of two passes do not share
            start = time.perf_counter()
            grams = collect_inputs(model, [batch], members, forward=forward, paths=paths, mask=mask)
            seconds += (time.perf_counter() - start) / size * max(samples[layer.name] for layer in members)
            seen: dict[int, str] = {}
            for layer in members:
                gram = grams.get(layer.name)
                rows[layer.name] *= gram.count / size if gram is not None else 0.0
                first[layer.name] = layer.name if gram is None else seen.setdefault(id(gram), layer.name)
    sharing: dict[str, list[ProtectedLayer]] = {}
    for layer in layers:
        sharing.setdefault(first[layer.name], []).append(layer)
    plans = {name: _plan_layer(members, paths[name], rows[name]) for name, members in sharing.items()}
    size_of_passes = [sum(plans[layer.name].bytes for layer in members if layer.name in plans) for members in passes]
    total: float | None = None
    if not any(parameter.is_meta for parameter in model.parameters()):
        product, decomposition = _measure_speeds()
        total = seconds + sum(plan.decomposition for plan in plans.values()) / decomposition
        if batch is None:  # a batch has been through model and products both
            total += sum(plan.flops for plan in plans.values()) / product
    return Plan(list(plans.values()), len(passes), max(size_of_passes), total)


def _plan_layer(layers: Sequence[ProtectedLayer], path: GramPath, rows: float) -> LayerPlan:
    """Return the estimated cost of one Gram matrix and its decomposition."""
    groups, dimension = layers[0].groups, layers[0].dimension
    is_wide = path.kind != "float64"
    size: float = bound_bytes(layers[0], path)
    strip = min(dimension, WIDE_STRIP if is_wide else STRIP)  # half of a symmetric matrix is computed
    flops, decomposition = groups * rows * dimension * (dimension + strip), 0.0
    if layers[0].layer_type.is_lookup:
        flops = 0.0
    elif rows < (count_buffer_rows(dimension) if is_wide else dimension):
        size, flops = 4 * groups * rows * dimension, 0.0
        decomposition = SVD * groups * min(rows, dimension) * rows * dimension
    elif is_wide:
        flops += ITERATION * dimension**3
    else:
        decomposition = EIGH * groups * dimension**3
    forward = 2 * rows * sum(0 if la.layer_type.is_lookup else la.weight.tensor.numel() for la in layers)
    names = [layer.name for layer in layers]
    return LayerPlan(names, path.kind, dimension, round(rows), round(size), flops, decomposition, forward)


def _measure_speeds() -> tuple[float, float]:
    """Return the FLOPs per second of products in float32 and of decompositions in float64 on this machine."""
    probe = torch.eye(PROBE, device="cpu") + 1.0 / PROBE
    product = 2.0 * PROBE**3 / _time_work(lambda: probe @ probe)
    return product, EIGH * PROBE**3 / _time_work(lambda: torch.linalg.eigh(probe.double()))


def _time_work(work: Callable[[], object]) -> float:
    """Return the shorter time of two runs, of which the first is a warm-up."""
    return min(timeit.repeat(work, number=1, repeat=2))
