"""Resize layers: units are added, copied or removed, and all tensors with an entry per unit follow.

A unit is one output of an `nn.Linear` or one channel of an `nn.Conv2d`. It has a row in its layer's weight, an entry in
its bias and in the BatchNorm behind it, and a column in every layer that it feeds; where a convolution feeds a linear
layer, one column for each pixel of a channel. Units that remain keep their place and all their weights, and new
units are appended. So the network before it grew is its first units alone (`slice_units`), to the bit.

A layer can be resized if the layers that it feeds have no other source at the same place. So the stages of a residual
network keep their width, and the convolutions inside its blocks can be resized.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sgp.networks.wiring import Wiring, count_units, get_layer
from sgp.patterns import find_pattern

# Number of a unit that is to be added, among the numbers of existing units.
NEW = -1


@dataclass(frozen=True)
class Axis:
    """A dimension of a tensor along which the units of a layer lie.

    Attributes:
        tensor: Name of the parameter or buffer.
        dim: Index of the dimension.
        layer: Name of the layer.
        each: Number of consecutive entries for each unit.
    """

    tensor: str
    dim: int
    layer: str
    each: int


def connect_all_heads(wiring: Wiring, exclude: Sequence[str]) -> Wiring:
    """Return a wiring in which every head has the sources of the head that was run.

    Args:
        wiring: Wiring that was found by running one head.
        exclude: Patterns that match the names of heads.
    """
    heads = [name for name in wiring.places if find_pattern(name, exclude)]
    sources = next((wiring.places[name].sources for name in heads if wiring.places[name].sources), None)
    if sources is None:
        return wiring
    return Wiring({**wiring.places, **{name: replace(wiring.places[name], sources=sources) for name in heads}})


def find_axes(network: nn.Module, wiring: Wiring) -> tuple[Axis, ...]:
    """Return every axis of every layer of a network that can be resized."""
    axes = []
    for name in wiring.gated:
        fed = [other for other, place in wiring.places.items() if name in place.sources]
        is_only_source = all(wiring.places[other].sources == (name,) for other in fed)
        if not is_only_source or any(getattr(get_layer(network, other), "groups", 1) > 1 for other in [name, *fed]):
            continue
        for module_name in filter(None, (name, wiring.places[name].norm)):
            module = network.get_submodule(module_name)
            tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            axes += [Axis(f"{module_name}.{key}", 0, name, 1) for key, tensor in tensors if tensor.dim()]
        count = count_units(get_layer(network, name))
        axes += [Axis(f"{other}.weight", 1, name, get_layer(network, other).weight.shape[1] // count) for other in fed]
    return tuple(axes)


def get_sizes(network: nn.Module, axes: Sequence[Axis]) -> dict[str, int]:
    """Return the number of units of each layer that can be resized."""
    return {name: count_units(get_layer(network, name)) for name in dict.fromkeys(axis.layer for axis in axes)}


@torch.no_grad()
def rearrange(network: nn.Module, axes: Sequence[Axis], name: str, chosen: Tensor) -> None:
    """Select the units of a layer.

    New weights are drawn from torch's global generator, uniform and with the mean square of the tensor that they
    extend; in a BatchNorm they have the initial values.

    Args:
        network: Network to change. Its resized parameters are new objects, which must be added to optimizers.
        axes: Axes of the network.
        name: Name of the layer.
        chosen: Number of the old unit at each place, or NEW: [units], integer. A unit may be repeated.
    """
    last = has_channels_last(network)
    for axis in axes:
        if axis.layer != name:
            continue
        parent, _, key = axis.tensor.rpartition(".")
        module = network.get_submodule(parent)
        old = getattr(module, key)
        entries = (chosen.unsqueeze(1) * axis.each + torch.arange(axis.each)).flatten()
        new = old.detach().index_select(axis.dim, entries.clamp(min=0))
        added = (chosen == NEW).repeat_interleave(axis.each).nonzero().flatten()
        if len(added):
            shape = [len(added) if dim == axis.dim else size for dim, size in enumerate(new.shape)]
            new.index_copy_(axis.dim, added, _draw_entries(module, key, old, shape))
        new = set_memory_format(new, last=last)
        setattr(module, key, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)
        _update_size(module, axis.dim, new.shape[axis.dim])


def widen(network: nn.Module, axes: Sequence[Axis], name: str, more: int) -> None:
    """Append units to a layer.

    Args:
        network: Network to change.
        axes: Axes of the network.
        name: Name of the layer.
        more: Number of new units.
    """
    if more < 0:
        raise ValueError(f"the number of units to add to {name!r} must be at least 0, got {more}")
    resize(network, axes, {name: count_units(get_layer(network, name)) + more})


def resize(network: nn.Module, axes: Sequence[Axis], sizes: Mapping[str, int]) -> None:
    """Set the number of units of layers: the first units remain, and new ones are appended if these do not suffice."""
    for name, size in sizes.items():
        numbers = torch.arange(size)
        count = count_units(get_layer(network, name))
        if size != count:
            rearrange(network, axes, name, torch.where(numbers < count, numbers, NEW))


def slice_units(network: nn.Module, axes: Sequence[Axis], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the tensors that have units, with the first `sizes` units of each layer; gradients pass through."""
    whole = dict(network.named_parameters()) | dict(network.named_buffers())
    slices: dict[str, Tensor] = {}
    for axis in axes:
        tensor = slices.get(axis.tensor, whole[axis.tensor])
        slices[axis.tensor] = tensor.narrow(axis.dim, 0, sizes[axis.layer] * axis.each)
    # In the memory format of a network of this size, since products of other strides may round otherwise.
    last = has_channels_last(network)
    return {name: set_memory_format(tensor, last=last) for name, tensor in slices.items()}


def mask_new_entries(network: nn.Module, axes: Sequence[Axis], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Return, for each parameter, the mask of the entries that do not belong to the first `sizes` units of all layers.

    The mask of a parameter that never grows is False everywhere.
    """
    masks = {name: torch.zeros_like(each, dtype=torch.bool) for name, each in network.named_parameters()}
    for axis in axes:
        if axis.tensor in masks:
            start = sizes[axis.layer] * axis.each
            mask = masks[axis.tensor]
            mask.narrow(axis.dim, start, mask.shape[axis.dim] - start).fill_(True)
    return masks


def has_channels_last(network: nn.Module) -> bool:
    """Return whether a network's convolutions are in the memory format channels_last."""
    images = [each for each in network.parameters() if each.dim() == 4]
    return any(each.is_contiguous(memory_format=torch.channels_last) and not each.is_contiguous() for each in images)


def set_memory_format(tensor: Tensor, *, last: bool) -> Tensor:
    """Return a tensor without gaps, with channels last if it has channels; itself if it already is."""
    return tensor.contiguous(
        memory_format=torch.channels_last if tensor.dim() == 4 and last else torch.contiguous_format
    )


def _draw_entries(module: nn.Module, key: str, old: Tensor, shape: Sequence[int]) -> Tensor:
    """Draw the initial values of new entries."""
    if isinstance(module, _BatchNorm):
        return old.new_full(shape, 1.0 if key in ("weight", "running_var") else 0.0)
    bound = math.sqrt(3 * old.square().mean().item())  # a uniform number's mean square is a third of its bound's square
    return torch.empty(shape, dtype=old.dtype).uniform_(-bound, bound).to(old.device)


def _update_size(module: nn.Module, dim: int, size: int) -> None:
    """Update a module's attributes in_features, out_channels and others after a resize."""
    if isinstance(module, _BatchNorm):
        module.num_features = size
    else:
        unit = "features" if isinstance(module, nn.Linear) else "channels"
        setattr(module, f"{'in' if dim else 'out'}_{unit}", size)
