"""Measure the effect of training since the last update: leak into the protected space, drift of a batch's outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sgp.projection.anchor import extend_rows, has_grown, list_tensors, match_names
from sgp.projection.batches import evaluation_pass, iterate_tensors, make_forward, move_batch
from sgp.projection.capacity import align_columns
from sgp.projection.collect import collect_inputs
from sgp.projection.distributed import ProcessGroup
from sgp.projection.gram import InputGram
from sgp.projection.layer import ProtectedLayer, iterate_parameters
from sgp.projection.precision import to_float64
from sgp.projection.protected_model import ProtectedModel
from sgp.projection.sharded import distribute_like, gather_whole, get_local

# A change counts as rounding if it is smaller than this share of the weight,
ROUNDING = 2.0**-20
# or if its entries are smaller than this on average: a step that is projected away leaves such a change in a weight
# that was zero.
ROUNDING_OF_ENTRIES = 2.0**-24


@dataclass(frozen=True)
class LayerCheck:
    """Measurements of one protected layer.

    Attributes:
        layer: Name of the layer.
        captured: Share of the energy of the batch's inputs that the layer's bases capture.
        leak: Share of the weight change along bases of importance 1, along which no change is allowed.
        drift: |dW x| / |W x| over the batch: relative change of the layer's output for these inputs.
    """

    layer: str
    captured: float
    leak: float
    drift: float


@dataclass(frozen=True)
class Check:
    """Comparison of a model with reference weights on one batch.

    Attributes:
        drift: Relative change of the model's outputs.
        layers: Measurements of each layer.
    """

    drift: float
    layers: list[LayerCheck]

    @property
    def leak(self) -> float:
        """The largest leak of any layer."""
        return max((layer.leak for layer in self.layers), default=0.0)

    def __str__(self) -> str:
        rows = [(x.layer, f"{x.captured:.1%}", f"{x.leak:.1e}", f"{x.drift:.1e}") for x in self.layers]
        table = align_columns([("layer", "captured", "leak", "drift"), *rows])
        return "\n".join([f"outputs drifted by {self.drift:.2e}", *table])


def measure_changes(
    protected: ProtectedModel,
    batch: Any,
    reference: Mapping[str, Tensor],
    forward: Callable[[Any], Any] | None,
    mask: Callable[[Any], Tensor | None] | None = None,
) -> Check:
    """Compare a model with reference weights on one batch.

    Args:
        protected: Model with its protected layers.
        batch: As in ``memory.update``.
        reference: Weights to compare with, by name.
        forward: As in ``memory.update``.
        mask: As in ``memory.update``.

    Returns:
        The comparison.
    """
    model = protected.model
    batch = move_batch(batch, model)
    parameters = protected.scan.parameters.values()
    reference = match_names(model, reference, {id(p.tensor): p.name for p in parameters if p.is_present})
    layers = [layer for layer in protected.layers.values() if layer.subspace is not None]
    # All processes run the forward passes of a sharded model together.
    processes = ProcessGroup(protected.is_sharded)
    tensors = {parameter.name: parameter.tensor for parameter in iterate_parameters(layers)}
    processes.run_together(partial(check_reference, reference, tensors))
    collect = partial(
        collect_inputs,
        model,
        [batch],
        layers,
        forward=forward,
        mask=mask,
        in_step=processes.run_in_lockstep if protected.is_sharded else None,
    )
    grams = processes.run_together(collect)
    run = forward or make_forward(model)
    with evaluation_pass(model, ()):
        now = _list_outputs(run(batch))
        protected.reshard()
        with swap_weights(model, reference):
            then = _list_outputs(run(batch))
            protected.reshard()
    checks = [_check_layer(layer, grams[layer.name], reference) for layer in layers if layer.name in grams]
    difference = sum(float((a - b).square().sum()) for a, b in zip(now, then, strict=True)) ** 0.5
    size = sum(float(b.square().sum()) for b in then) ** 0.5
    return Check(_divide(difference, size), checks)


def check_reference(reference: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Raise if a reference does not fit the tensors of a model.

    Args:
        reference: Reference weights by name.
        tensors: Parameters and buffers of the model by name, which the reference must have.

    Raises:
        ValueError: The reference lacks a tensor, has another shape, or is the model's own tensor.
    """
    for name, tensor in tensors.items():
        if name not in reference:
            raise ValueError(f"reference: {name!r} is missing; pass a whole state_dict of the model")
        given, own = get_local(reference[name]), get_local(tensor)
        if own.numel() and given.device == own.device and given.data_ptr() == own.data_ptr():
            raise ValueError(
                "reference: these are the model's own tensors, which training changes; pass a copy, "
                "copy.deepcopy(model.state_dict())"
            )
        if reference[name].shape != tensor.shape and not has_grown(reference[name], tensor):
            then, now = tuple(reference[name].shape), tuple(tensor.shape)
            raise ValueError(f"reference: {name!r} has shape {then}, the model has {now}")


@contextmanager
def swap_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Run the body with other values in a model's parameters and buffers.

    The values are copied into the tensors: ``load_state_dict`` would drop names that wrappers have changed, and run
    hooks.

    Args:
        model: Any module.
        weights: Values by name; tensors that are missing stay as they are.

    Yields:
        Nothing.
    """
    tensors = {name: tensor for name, tensor in list_tensors(model).items() if name in weights}
    kept = {name: get_local(tensor).clone() for name, tensor in tensors.items()}
    try:
        with torch.no_grad():
            for name, tensor in tensors.items():
                value = distribute_like(extend_rows(weights[name], tensor).to(tensor.device), tensor)
                get_local(tensor).copy_(get_local(value))
        torch.clear_autocast_cache()  # which identifies weights by their identity
        yield
    finally:
        with torch.no_grad():
            for name, tensor in tensors.items():
                get_local(tensor).copy_(kept[name])
        torch.clear_autocast_cache()


def _check_layer(layer: ProtectedLayer, gram: InputGram, reference: Mapping[str, Tensor]) -> LayerCheck:
    subspace = layer.subspace
    assert subspace is not None
    new = _join(layer, {parameter.name: parameter.tensor for parameter in layer.parameters})
    earlier = {p.name: extend_rows(reference[p.name], p.tensor) for p in layer.parameters}
    old = _join(layer, earlier).to(new.device)
    change = new - old
    moved = float(change.norm())
    # A layer without free capacity changes by rounding only, which is no leak.
    rounding = max(ROUNDING * float(old.norm()), ROUNDING_OF_ENTRIES * change.numel() ** 0.5)
    leaked = float(subspace.compute_blocked_coefficients(*_split(layer, change)).norm())
    return LayerCheck(
        layer=layer.name,
        captured=_divide(float(subspace.compute_captured_energy(gram).sum()), float(gram.compute_energy().sum())),
        leak=_divide(leaked, moved) if moved > rounding else 0.0,
        drift=_divide(
            float(gram.compute_energy_through(change).sum()) ** 0.5,
            float(gram.compute_energy_through(old).sum()) ** 0.5,
        ),
    )


def _join(layer: ProtectedLayer, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return weight and protected bias, gathered if they are sharded, as one float64 matrix [groups, out, d]."""
    matrix = to_float64(layer.block.view_matrix(gather_whole(tensors[layer.weight.name])))
    if layer.bias is None:
        return matrix
    bias = to_float64(layer.block.view_bias(gather_whole(tensors[layer.bias.name])))
    return torch.cat([matrix, bias.unsqueeze(-1)], dim=-1)


def _split(layer: ProtectedLayer, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias of a matrix that :func:`_join` made."""
    return (matrix, None) if layer.bias is None else (matrix[..., :-1], matrix[..., -1])


def _divide(part: float, whole: float) -> float:
    return part / whole if whole != 0 else 0.0


def _list_outputs(value: Any) -> list[Tensor]:
    """Return copies of the tensors in a model's output, in float64.

    Raises:
        TypeError: There are none.
    """
    found = [to_float64(tensor).clone() for tensor in iterate_tensors(value) if tensor.is_floating_point()]
    if not found:
        raise TypeError(
            f"an output of type {type(value).__name__} has no floating point tensor to compare: pass a forward= that "
            "returns tensors, or tuples, lists or dicts of them"
        )
    return found
