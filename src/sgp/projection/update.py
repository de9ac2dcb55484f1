"""The steps of an update: scan the model, plan the passes over the data, collect input Gram matrices, grow bases."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from sgp.patterns import check_patterns, find_pattern
from sgp.projection.batches import warn_unless_shuffled
from sgp.projection.caller_warning import warn_caller
from sgp.projection.collect import collect_inputs
from sgp.projection.distributed import ProcessGroup
from sgp.projection.gram import GramPath, InputGram
from sgp.projection.layer import ProtectedLayer
from sgp.projection.protected_model import ProtectedModel
from sgp.projection.scan import Scan, ScanRules, scan_model
from sgp.projection.sketch import WideGram, bound_wide_bytes
from sgp.projection.subspace import Bases, Subspace, UncertifiedError
from sgp.projection.tokens import TokenCounts, TokenSubspace
from sgp.projection.update_report import LayerUpdate, UpdateProgress, describe_update

Threshold = float | Callable[[int], float]
GramChoice = Literal["auto", "float64", "float32", "sketch"]
GRAM_CHOICES = ("auto", "float64", "float32", "sketch")
# Bases of a layer, the Gram matrix of its inputs and the threshold -> bases after the task.
Grow = Callable[[Bases, InputGram, float], Bases]

# Above this threshold the energy that may be lost is too close to the rounding of float32.
FLOAT32_CEILING = 0.999
# gram="auto" takes float64 up to this dimension, where it is fast, and considers a sketch from this one on.
FLOAT64_DIMENSION, SKETCH_DIMENSION = 512, 2048
# Several processes take so many times as many test directions as the first rows need, because they cannot add any.
SHARED_OVERSAMPLING = 1.5
# The Gram matrices of as many layers are collected in one pass over the data as fit in this many bytes.
DEFAULT_BUDGET = 2 * 2**30

V = TypeVar("V")


@dataclass(frozen=True)
class UpdatePlan:
    """Settings of an update, before any data are read.

    Attributes:
        scan: The model's parameters as they are now, with the bases that their layers have.
        thresholds: Threshold of each layer.
        limits: Number of samples of each layer; None for all.
        paths: How the inputs of each layer are collected.
        passes: Layers by pass over the data.
    """

    scan: Scan
    thresholds: Mapping[str, float]
    limits: Mapping[str, int | None]
    paths: Mapping[str, GramPath]
    passes: Sequence[Sequence[ProtectedLayer]]


def rescan(protected: ProtectedModel, rules: ScanRules) -> Scan:
    """Sort the parameters of a model as it is now, and hand the bases over to the layers.

    A layer that was wrapped or moved inside the model since the last update is recognized by its weight. A model
    without a layer to protect, and a layer whose inputs have changed, raise a ValueError.

    Returns:
        Parameters of the model, and its layers with their bases.
    """
    old = protected.subspaces
    dimensions = {name: subspace.dimension for name, subspace in old.items()}
    scan = scan_layers(protected.model, rules, dimensions)
    renamed = _find_renamed(protected, scan)
    if renamed:
        dimensions |= {new: dimensions[name] for name, new in renamed.items()}
        scan = scan_layers(protected.model, rules, dimensions)
    gone = []
    for name, subspace in old.items():
        layer = scan.layers.get(renamed.get(name, name))
        if layer is not None:
            layer.subspace = subspace
        elif not find_pattern(name, rules.exclude):
            gone.append(name)
    if gone:
        warn_caller(f"{', '.join(gone)} is gone from the model, and its bases with it")
    resize_subspaces(scan.layers.values())
    return scan


def scan_layers(model: nn.Module, rules: ScanRules, dimensions: Mapping[str, int] | None = None) -> Scan:
    """Return the sorted parameters of a model that has at least one layer to protect.

    Raises:
        ValueError: The model has no such layer.
    """
    scan = scan_model(model, rules, dimensions=dimensions)
    if not scan.layers:
        raise ValueError(
            "the model has no layer to protect: every layer is excluded, not trained, or of a type "
            "that is not known (give it to sgp.register_layer)"
        )
    return scan


def resize_subspaces(layers: Iterable[ProtectedLayer]) -> bool:
    """Let the bases of embeddings follow a vocabulary that has grown.

    Returns:
        Whether the bases of any layer were replaced.

    Raises:
        ValueError: A layer's inputs are not those of its bases.
    """
    resized: dict[tuple[int, int], Bases] = {}  # layers that share bases go on sharing them
    following = []
    for layer in layers:
        subspace = layer.subspace
        if subspace is None or not layer.weight.is_present:
            continue
        subspace = resized.setdefault((id(subspace), layer.dimension), subspace.resize(layer.dimension))
        if (subspace.groups, subspace.dimension) != (layer.groups, layer.dimension):
            raise ValueError(
                f"layer {layer.name!r} has changed since the last update: its inputs have {layer.groups} x "
                f"{layer.dimension} dimensions, its bases {subspace.groups} x {subspace.dimension}. Only a vocabulary "
                "may grow: restore the layer, or continue with a new GradientMemory, which protects nothing of "
                "older tasks"
            )
        following.append((layer, subspace))
    has_changed = any(layer.subspace is not subspace for layer, subspace in following)
    for layer, subspace in following:
        layer.subspace = subspace
    return has_changed


def _find_renamed(protected: ProtectedModel, scan: Scan) -> dict[str, str]:
    """Return old name -> new name of the layers whose weight is now found elsewhere in the model."""
    places = {(id(layer.weight.tensor), layer.block): name for name, layer in scan.layers.items()}
    lost = [layer for layer in protected.layers_with_bases if layer.name not in scan.layers and layer.weight.is_present]
    found = {layer.name: places.get((id(layer.weight.tensor), layer.block)) for layer in lost}
    return {name: place for name, place in found.items() if place is not None}


def find_threshold(threshold: Threshold | Mapping[str, Threshold], layer: ProtectedLayer, task: int) -> float:
    """Return the threshold of a layer for a task.

    Raises:
        ValueError: No pattern matches the layer.
    """
    value = match_layer(threshold, layer) if isinstance(threshold, Mapping) else threshold
    if value is None:
        raise ValueError(f"threshold: no pattern matches the layer {layer.name!r}; add one, such as '*'")
    return check_threshold(value(task) if callable(value) else value, f"threshold of layer {layer.name!r}")


def check_threshold(value: Any, name: str) -> float:
    """Return a threshold as a number.

    Raises:
        ValueError: It is not a number in (0, 1].
    """
    if not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {value!r}")
    return float(value)


def find_limits(
    model: nn.Module, samples: int | Mapping[str, int] | None, layers: Mapping[str, ProtectedLayer]
) -> dict[str, int | None]:
    """Return the number of samples of each layer; None for all.

    Raises:
        ValueError: A number is below 1.
    """
    if isinstance(samples, Mapping):
        check_patterns(model, samples, "samples", layers)
    limits: dict[str, int | None] = {}
    for name, layer in layers.items():
        limit = match_layer(samples, layer) if isinstance(samples, Mapping) else samples
        if limit is not None and limit < 1:
            raise ValueError(f"samples of layer {name!r} must be at least 1, got {limit}")
        limits[name] = limit
    return limits


def match_layer(values: Mapping[str, V], layer: ProtectedLayer) -> V | None:
    """Return the value of the first pattern that matches a layer's name or that of its weight."""
    for pattern, value in values.items():
        if find_pattern(layer.name, [pattern]) or find_pattern(layer.weight.name, [pattern]):
            return value
    return None


def choose_path(gram: GramChoice, layer: ProtectedLayer, threshold: float, *, can_repeat: bool) -> GramPath:
    """Return how the inputs of a layer are collected. It depends on settings and shapes only.

    Args:
        gram: The memory's setting: ``"auto"``, or the cheapest path that is allowed.
        layer: Layer whose inputs are collected.
        threshold: Threshold of the layer.
        can_repeat: Whether there can be another pass over the data, which a sketch may need.
    """
    fits_float32 = (
        layer.groups == 1
        and not layer.layer_type.is_lookup
        and threshold <= FLOAT32_CEILING
        and layer.weight.tensor.dtype != torch.float64
    )
    is_wide = gram != "auto" or layer.dimension > FLOAT64_DIMENSION
    if gram == "float64" or not fits_float32 or not is_wide:
        return GramPath("float64", threshold)
    allows_sketch = gram == "sketch" or (gram == "auto" and layer.dimension >= SKETCH_DIMENSION)
    return GramPath("sketch" if allows_sketch and can_repeat else "float32", threshold)


def group_passes(
    layers: Iterable[ProtectedLayer], budget: int, paths: Mapping[str, GramPath]
) -> list[list[ProtectedLayer]]:
    """Return layers grouped into passes whose Gram matrices fit in a budget.

    Layers that share bases stay together; a group of them that does not fit gets a pass of its own. Only layers of one
    pass can share a Gram matrix, and layers that are separated once have bases of their own from then on. What layers
    without bases will share is not known, but most of it lies inside one module or one parent (query, key and value),
    so a pass ends between two parents wherever a parent fits.
    """
    passes: list[list[ProtectedLayer]] = [[]]
    used = 0

    def end_pass_unless_fits(size: int) -> None:
        nonlocal used
        if passes[-1] and used + size > budget:
            passes.append([])
            used = 0

    for _, group in itertools.groupby(_find_units(layers), key=_find_parent):
        units = list(group)
        sizes = [_bound_bytes(unit, paths) for unit in units]
        end_pass_unless_fits(sum(sizes))
        for unit, size in zip(units, sizes, strict=True):
            end_pass_unless_fits(size)
            passes[-1] += unit
            used += size
    return passes


def _find_units(layers: Iterable[ProtectedLayer]) -> list[list[ProtectedLayer]]:
    """Return groups of layers that must stay together: of one subspace, or of one module where there is none yet."""
    units: dict[object, list[ProtectedLayer]] = {}
    for layer in layers:
        key = layer.sources[0].module if layer.subspace is None else id(layer.subspace)
        units.setdefault(key, []).append(layer)
    return list(units.values())


def _find_parent(unit: Sequence[ProtectedLayer]) -> object:
    """Return what units must agree in to come to share a Gram matrix; units that have bases do not."""
    return id(unit) if unit[0].subspace is not None else unit[0].sources[0].module.rpartition(".")[0]


def _bound_bytes(unit: Sequence[ProtectedLayer], paths: Mapping[str, GramPath]) -> int:
    """Return the most bytes that the Gram matrices of a unit take. Layers of one subspace share one."""
    grams = {id(layer.subspace or layer): layer for layer in unit}
    return sum(bound_bytes(layer, paths[layer.name]) for layer in grams.values())


def bound_bytes(layer: ProtectedLayer, path: GramPath) -> int:
    """Return the most bytes that the Gram matrix of a layer takes, or the rows that are kept instead."""
    if layer.layer_type.is_lookup:
        return 8 * layer.dimension
    if path.kind == "float64":
        return 8 * layer.groups * layer.dimension**2
    return bound_wide_bytes(layer.dimension)


def collect_subspaces(
    plan: UpdatePlan,
    processes: ProcessGroup,
    protected: ProtectedModel,
    batches: Iterable[Any],
    *,
    forward: Callable[[Any], Any] | None,
    mask: Callable[[Any], Tensor | None] | None,
    grow: Grow,
) -> tuple[dict[str, Bases], list[LayerUpdate]]:
    """Run the passes of an update.

    Layers whose sketch does not certify the threshold take part in one more pass, with a float32 Gram matrix.

    Returns:
        The bases after the task, by layer, of the layers that saw an input; and what happened to each Gram matrix.

    Raises:
        ValueError: No layer saw an input.
    """
    if any(limit is not None for limit in plan.limits.values()):
        warn_unless_shuffled(batches)
    shares = {name: processes.split_samples(limit, batches) for name, limit in plan.limits.items()}
    subspaces: dict[str, Bases] = {}
    updates: list[LayerUpdate] = []
    reached: set[str] = set()
    passes = [(members, plan.paths) for members in plan.passes]
    collect = partial(
        collect_inputs,
        protected.model,
        batches,
        forward=forward,
        samples=shares,
        mask=mask,
        in_step=processes.run_in_lockstep if protected.is_sharded else None,
    )
    with UpdateProgress(len(passes), batches, is_shown=processes.rank == 0) as progress:
        for number, (members, paths) in enumerate(passes):  # grows while it runs
            if processes.size > 1:
                paths = _choose_test_directions(processes, members, paths, collect)
            run = partial(collect, layers=members, paths=paths, after_batch=progress.advance)
            grams, found = processes.merge_grams(processes.run_together(run))
            reached |= found
            grown, rows, failed = processes.run_together(partial(_grow_subspaces, plan, grams, grow))
            subspaces |= processes.broadcast_bases(grown)
            is_repeated = number >= len(plan.passes)
            updates += [replace(row, passes=1 + is_repeated) for row in processes.gather_lists(rows)]
            failed = processes.gather_lists(failed)
            if failed:
                again = [layer for layer in members if layer.name in failed]
                passes.append((again, {name: replace(paths[name], kind="float32", omega=None) for name in failed}))
                progress.add_pass()
    if not reached:
        raise ValueError(
            "none of the protected layers saw an input: is this the model that the batches run through, and does "
            "the mask leave any position?"
        )
    return subspaces, updates


def _choose_test_directions(
    processes: ProcessGroup,
    layers: Sequence[ProtectedLayer],
    paths: Mapping[str, GramPath],
    collect: Callable[..., dict[str, InputGram]],
) -> dict[str, GramPath]:
    """Return paths with the same test directions on every process, which the first one chooses for its first rows.

    Sketches of different test directions cannot be summed, so a width is chosen that later rows hardly exceed.
    """
    sketched = [layer for layer in layers if paths[layer.name].kind == "sketch"]
    if not sketched:
        return dict(paths)

    def is_enough(grams: Mapping[str, InputGram]) -> bool:
        return all(name in grams and grams[name].is_folded for name in (layer.name for layer in sketched))

    grams = processes.run_together(partial(collect, layers=sketched, paths=paths, after_batch=is_enough))
    chosen: dict[int, Tensor | None] = {}
    for gram in grams.values():
        if id(gram) not in chosen:
            chosen[id(gram)] = gram.choose_omega(SHARED_OVERSAMPLING) if isinstance(gram, WideGram) else None
    # One object for all layers that share it: pickling keeps that.
    omegas = processes.broadcast_object({name: chosen[id(gram)] for name, gram in grams.items()})
    result = dict(paths)
    for layer in sketched:
        omega = omegas.get(layer.name)
        result[layer.name] = replace(paths[layer.name], kind="float32" if omega is None else "sketch", omega=omega)
    return result


def _grow_subspaces(
    plan: UpdatePlan, grams: Mapping[str, InputGram], grow: Grow
) -> tuple[dict[str, Bases], list[LayerUpdate], list[str]]:
    """Return the bases after a task; layers that share Gram matrix, bases and threshold go on sharing bases.

    Returns:
        Bases by layer, what happened to each Gram matrix, and the layers whose sketch does not certify the threshold.

    Raises:
        ValueError: A layer's inputs are not those of its bases.
    """
    sharing: dict[tuple[int, int, float], list[str]] = {}
    for name, gram in grams.items():
        key = id(gram), id(plan.scan.layers[name].subspace), plan.thresholds[name]
        sharing.setdefault(key, []).append(name)
    grown: dict[str, Bases] = {}
    updates: list[LayerUpdate] = []
    failed: list[str] = []
    for names in sharing.values():
        name, gram = names[0], grams[names[0]]
        bases = plan.scan.layers[name].subspace or _make_empty(gram)
        if (bases.groups, bases.dimension) != (gram.groups, gram.dimension):
            raise ValueError(
                f"layer {name!r} has changed: its inputs have {gram.groups} x {gram.dimension} dimensions, its "
                f"bases {bases.groups} x {bases.dimension}"
            )
        try:
            result = grow(bases, gram, plan.thresholds[name])
        except UncertifiedError:
            failed += names
            continue
        updates.append(describe_update(names, bases, result, gram))
        grown |= dict.fromkeys(names, result)
    return grown, updates, failed


def _make_empty(gram: InputGram) -> Bases:
    """Return bases without vectors for the inputs of a Gram matrix."""
    if isinstance(gram, TokenCounts):
        return TokenSubspace.empty(gram.dimension)
    return Subspace.empty(gram.groups, gram.dimension)


def check_not_single_batch(batches: Any) -> None:
    """Raise if batches look like a single one, which would be taken apart into wrong batches.

    Raises:
        TypeError: They do.
    """
    is_tensor_pair = isinstance(batches, tuple) and len(batches) == 2 and all(isinstance(b, Tensor) for b in batches)
    if isinstance(batches, Tensor | Mapping | PackedSequence) or (
        is_tensor_pair and batches[0].dim() != batches[1].dim()
    ):
        raise TypeError("an iterable of batches is needed, and this looks like a single batch: pass [batch]")


def check_passes(passes: Sequence[object], batches: Iterable[Any], budget: int) -> None:
    """Raise if several passes over the data are needed and an iterator gives only one.

    Raises:
        ValueError: This is so.
    """
    if len(passes) > 1 and isinstance(batches, Iterator):
        raise ValueError(
            f"the Gram matrices take {len(passes)} passes over the data and an iterator gives one: pass a "
            f"list or a DataLoader, or a larger budget= (bytes; now {budget})"
        )
