"""Growing layers: units are added to a layer, doubled or taken out, and everything that hears them follows.

A unit is one output of an `nn.Linear` or one channel of an `nn.Conv2d`. It has a row in its layer's weight, an entry in
its bias and in the BatchNorm behind it, and in every layer that it feeds a column; where a convolution feeds a linear
layer, one column for each pixel of a channel. Units that stay keep their place and the values of all their weights, and
new ones come after them. So a network as it was before it grew is its first units alone (`cut`), to the bit.

A layer can be widened if what it feeds hears no other layer at the same place. So the stages of a residual network
keep their width, and the convolutions inside its blocks do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sgp.networks.wiring import Layer, Wiring, units
from sgp.patterns import find_pattern

# A unit that is not there yet, among the numbers of those that are.
NEW = -1


@dataclass(frozen=True)
class Axis:
    """A dimension of a tensor along which the units of a layer lie.

    Attributes:
        tensor: name of the parameter or buffer.
        dim: the dimension.
        layer: whose units.
        each: how many entries there are for each unit, one after another.
    """

    tensor: str
    dim: int
    layer: str
    each: int


def with_all_heads(wiring: Wiring, exclude: Sequence[str]) -> Wiring:
    """A wiring in which heads that were not run hear what the one hears that was.

    Args:
        wiring: found by running one head.
        exclude: patterns on the names of heads.
    """
    heard = [place.sources for name, place in wiring.places.items() if place.sources and find_pattern(name, exclude)]
    places = {
        name: replace(place, sources=heard[0]) if heard and find_pattern(name, exclude) else place
        for name, place in wiring.places.items()
    }
    return Wiring(places)


def axes_of(network: nn.Module, wiring: Wiring) -> tuple[Axis, ...]:
    """Every axis of every layer of a network that can be widened."""
    found = []
    for name in wiring.gated:
        hearing = [other for other, place in wiring.places.items() if name in place.sources]
        alone = all(wiring.places[other].sources == (name,) for other in hearing)
        if not alone or any(_groups(network, other) > 1 for other in [name, *hearing]):
            continue
        own = [name, *([norm] if (norm := wiring.places[name].norm) else [])]
        tensors = [tensor for module in own for tensor in _vectors_and_weight(network, module)]
        found += [Axis(tensor, 0, name, 1) for tensor in tensors]
        count = units(_layer(network, name))
        for other in hearing:
            weight = _layer(network, other).weight
            found.append(Axis(f"{other}.weight", 1, name, weight.shape[1] // count))
    return tuple(found)


def sizes_of(network: nn.Module, axes: Sequence[Axis]) -> dict[str, int]:
    """How many units each layer has that can be widened."""
    return {name: units(_layer(network, name)) for name in dict.fromkeys(axis.layer for axis in axes)}


@torch.no_grad()
def rearrange(network: nn.Module, axes: Sequence[Axis], name: str, chosen: Tensor) -> None:
    """Give a layer other units.

    Args:
        network: is changed; its parameters of these axes are new objects, which an optimizer must be told of.
        axes: of the network.
        name: of the layer.
        chosen: number of the old unit that each is, or NEW: [units], integer. A unit may be there twice. Weights of
            new ones are drawn, uniform and as large in mean square as those of the same tensor; in a BatchNorm they
            start as all of its units did. Draws from torch's global generator.
    """
    last = channels_last(network)
    for axis in axes:
        if axis.layer != name:
            continue
        module, key = _parent(network, axis.tensor)
        old = getattr(module, key)
        entries = (chosen.unsqueeze(1) * axis.each + torch.arange(axis.each)).flatten()
        new = old.detach().index_select(axis.dim, entries.clamp(min=0))
        drawn = (chosen == NEW).repeat_interleave(axis.each).nonzero().flatten()
        if len(drawn):
            shape = [len(drawn) if dim == axis.dim else size for dim, size in enumerate(new.shape)]
            new.index_copy_(axis.dim, drawn, _fresh(module, key, old, shape))
        new = laid_out(new, last=last)
        setattr(module, key, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)
        _state_size(module, axis.dim, new.shape[axis.dim])


def widen(network: nn.Module, axes: Sequence[Axis], name: str, more: int) -> None:
    """Add so many units to a layer, behind those that it has."""
    if more < 0:
        raise ValueError(f"a layer grows by 0 units or more, {name!r} should by {more}")
    if more:
        count = units(_layer(network, name))
        rearrange(network, axes, name, torch.cat([torch.arange(count), torch.full((more,), NEW)]))


def resize(network: nn.Module, axes: Sequence[Axis], sizes: Mapping[str, int]) -> None:
    """Give layers so many units: the first of those that they have, and new ones behind if that is not enough."""
    for name, size in sizes.items():
        numbers = torch.arange(size)
        count = units(_layer(network, name))
        if size != count:
            rearrange(network, axes, name, torch.where(numbers < count, numbers, NEW))


def cut(network: nn.Module, axes: Sequence[Axis], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """The tensors that layers have units in, with the first `sizes` units of each alone; gradients pass through."""
    whole = dict(network.named_parameters()) | dict(network.named_buffers())
    found: dict[str, Tensor] = {}
    for axis in axes:
        tensor = found.get(axis.tensor, whole[axis.tensor])
        found[axis.tensor] = tensor.narrow(axis.dim, 0, sizes[axis.layer] * axis.each)
    # In memory as they were when they were all: a product of other strides may round otherwise.
    last = channels_last(network)
    return {name: laid_out(tensor, last=last) for name, tensor in found.items()}


def outside(network: nn.Module, axes: Sequence[Axis], sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """For each parameter, what came after layers had these sizes: True where the first units of all are not enough.

    Of a parameter that never grows that is nothing.
    """
    masks = {name: torch.zeros_like(each, dtype=torch.bool) for name, each in network.named_parameters()}
    for axis in axes:
        if axis.tensor in masks:
            start = sizes[axis.layer] * axis.each
            mask = masks[axis.tensor]
            mask.narrow(axis.dim, start, mask.shape[axis.dim] - start).fill_(True)
    return masks


def channels_last(network: nn.Module) -> bool:
    """Whether a network's convolutions have their channels last in memory."""
    images = [each for each in network.parameters() if each.dim() == 4]
    return any(each.is_contiguous(memory_format=torch.channels_last) and not each.is_contiguous() for each in images)


def laid_out(tensor: Tensor, *, last: bool) -> Tensor:
    """A tensor without gaps, with channels last or not; itself if it is that already."""
    if tensor.dim() == 4 and last:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()


def _fresh(module: nn.Module, key: str, old: Tensor, shape: Sequence[int]) -> Tensor:
    """What new entries start as."""
    if isinstance(module, _BatchNorm):
        return old.new_full(shape, 1.0 if key in ("weight", "running_var") else 0.0)
    bound = math.sqrt(3 * old.square().mean().item())  # a uniform number's mean square is a third of its bound's square
    return torch.empty(shape, dtype=old.dtype).uniform_(-bound, bound).to(old.device)


def _state_size(module: nn.Module, dim: int, size: int) -> None:
    """Let a module say how large it is."""
    if isinstance(module, nn.Linear):
        setattr(module, "in_features" if dim else "out_features", size)
    elif isinstance(module, nn.Conv2d):
        setattr(module, "in_channels" if dim else "out_channels", size)
    elif isinstance(module, _BatchNorm):
        module.num_features = size


def _vectors_and_weight(network: nn.Module, name: str) -> list[str]:
    """Parameters and buffers of a layer or norm that have an entry for each unit."""
    module = network.get_submodule(name)
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return [f"{name}.{key}" for key, tensor in own if tensor.dim()]


def _parent(network: nn.Module, tensor: str) -> tuple[nn.Module, str]:
    name, _, key = tensor.rpartition(".")
    return network.get_submodule(name), key


def _layer(network: nn.Module, name: str) -> Layer:
    layer = network.get_submodule(name)
    assert isinstance(layer, Layer)
    return layer


def _groups(network: nn.Module, name: str) -> int:
    layer = _layer(network, name)
    return layer.groups if isinstance(layer, nn.Conv2d) else 1
