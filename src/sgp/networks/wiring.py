"""Which units of a network feed which inputs of its layers, found by running it, and where units can be gated.

A unit is one output of an `nn.Linear` or one channel of an `nn.Conv2d`. It is gated behind the BatchNorm that follows
its layer directly, since the norm would undo a gate before it, and otherwise right behind the layer, since what comes
next may mix channels (LeNet's response normalisation). Gates are not negative: they pass through ReLU, pooling and
dropout.

Where outputs of several layers are added, as around a residual block, an input is fed by the units of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sgp.patterns import find_pattern

Layer = nn.Linear | nn.Conv2d
# Marks a layer that meets the network's own input, beside the names of layers.
INPUT = ""


@dataclass(frozen=True)
class Place:
    """A layer among the others.

    Attributes:
        norm: name of the BatchNorm that follows it directly; None if there is none.
        sources: names of the layers whose units are this layer's input, possibly added; none if it meets the network's
            own input.
    """

    norm: str | None
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Wiring:
    """All layers of a network by name, in the order of its modules."""

    places: Mapping[str, Place]

    @property
    def gated(self) -> list[str]:
        """The hidden layers: those whose units feed a layer."""
        feeding = {source for place in self.places.values() for source in place.sources}
        return [name for name in self.places if name in feeding]

    def gate_of(self, name: str) -> str:
        """The module behind which a layer's units are gated."""
        return self.places[name].norm or name

    def plain(self) -> dict[str, Any]:
        """Names and lists alone."""
        return {name: {"norm": place.norm, "sources": list(place.sources)} for name, place in self.places.items()}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Wiring:
        """Back from `plain`."""
        return cls({name: Place(each["norm"], tuple(each["sources"])) for name, each in plain.items()})


def units(layer: Layer) -> int:
    """How many a layer has."""
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def fed(layer: Layer, masks: Sequence[Tensor]) -> Tensor:
    """For each input of a layer the largest mask of the units that feed it; ones without any. masks: [units] each.

    Between a convolution and a linear layer each channel is spread over consecutive inputs, one for each pixel.
    """
    inputs = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    spread = [mask.repeat_interleave(inputs // len(mask)) for mask in masks]
    return torch.stack(spread).amax(dim=0) if spread else layer.weight.new_ones(inputs)


def as_gate(mask: Tensor, output: Tensor) -> Tensor:
    """A mask [units], or [n, units] with one for each example, in a shape that multiplies an output [n, units, ...]."""
    return mask.reshape(*mask.shape, *[1] * (output.dim() - 2))


def find_wiring(network: nn.Module, inputs: Tensor, head: int, *, exclude: Sequence[str] = ()) -> Wiring:
    """Run a network on a few inputs, in eval mode, and see what feeds what; draws random numbers for a check.

    Args:
        network: `network(inputs, head)`.
        inputs: two or more.
        head: to run it with.
        exclude: patterns on names of modules whose units are nobody's: they need not be gated.

    Raises:
        TypeError: gates could not keep what the network computes, and why.
    """
    modules = dict(network.named_modules())
    layers: dict[str, Layer] = {name: each for name, each in modules.items() if isinstance(each, Layer)}
    norms = {name: each for name, each in modules.items() if isinstance(each, _BatchNorm)}
    for name, module in modules.items():
        if name not in layers and name not in norms and not find_pattern(name, exclude) and _has_own_parameters(module):
            raise TypeError(
                f"{name!r} is of type {type(module).__name__}: only Linear, Conv2d and BatchNorm can be gated"
            )
    owners = _owners_of_norms(network, layers, norms, inputs, head)
    for name in norms:
        if name not in owners and not find_pattern(name, exclude):
            raise TypeError(f"BatchNorm {name!r} does not follow a layer directly: no gate can stand behind both")
    norm_of = {layer: norm for norm, layer in owners.items()}
    inner = [name for name in layers if not find_pattern(name, exclude)]
    sources = _sources(network, layers, {norm_of.get(name, name): name for name in inner}, inputs, head)
    # A layer that was not run, or that sees the network's own input beside others, is fed by what nobody gates.
    places = {
        name: Place(norm_of.get(name), () if INPUT in found else tuple(each for each in inner if each in found))
        for name, found in sources.items()
    }
    wiring = Wiring(places)
    _check(network, layers, wiring, inputs, head)
    return wiring


def _has_own_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _owners_of_norms(
    network: nn.Module, layers: Mapping[str, Layer], norms: Mapping[str, nn.Module], inputs: Tensor, head: int
) -> dict[str, str]:
    """The layer whose very output each norm takes; norms that take something else are left out."""
    # The tensors are kept, so that no later one gets the same id.
    outputs: dict[int, tuple[Tensor, str]] = {}
    owners: dict[str, str] = {}

    def after(name: str, output: Tensor) -> None:
        outputs[id(output)] = (output, name)

    def before(name: str, input: Tensor) -> None:
        if id(input) in outputs:
            owners[name] = outputs[id(input)][1]

    with torch.no_grad(), _watched(network, before=(norms, before), after=(layers, after)):
        network(inputs, head)
    return owners


def _sources(
    network: nn.Module, layers: Mapping[str, Layer], gates: Mapping[str, str], inputs: Tensor, head: int
) -> dict[str, set[str]]:
    """The layers that each layer's input is computed from, with no layer in between.

    Behind each gate the graph is cut and begun again from a new leaf, so that the leaves under a layer's input are
    its sources.

    Args:
        gates: the module behind which a layer's units are gated, and the layer.
    """
    leaves: dict[int, tuple[Tensor, str]] = {}
    found: dict[str, set[str]] = {name: set() for name in layers}

    def cut(value: Tensor, name: str) -> Tensor:
        leaf = value.detach().requires_grad_(value.is_floating_point())
        leaves[id(leaf)] = (leaf, name)
        return leaf.clone()  # a leaf cannot be changed in place, as ReLU does

    def after(gate: str, output: Tensor) -> Tensor:
        return cut(output, gates[gate])

    def before(name: str, input: Tensor) -> None:
        if input.dim() not in (2, 4):
            raise TypeError(f"layer {name!r} has an input of shape {tuple(input.shape)}: which units are they?")
        seen: set[Any] = set()
        open_ends = [input.grad_fn]
        while open_ends:
            node = open_ends.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if id(leaf) in leaves:
                found[name].add(leaves[id(leaf)][1])
            open_ends += [following for following, _ in node.next_functions]

    stations = {gate: network.get_submodule(gate) for gate in gates}
    with torch.enable_grad(), _watched(network, before=(layers, before), after=(stations, after)):
        network(cut(inputs, INPUT), head)
    return found


def _check(network: nn.Module, layers: Mapping[str, Layer], wiring: Wiring, inputs: Tensor, head: int) -> None:
    """Close half of all gates: an input that only closed units feed must be 0, whatever the open ones do."""
    for name, place in wiring.places.items():
        layer = layers[name]
        for source in place.sources:
            count, wide = units(layers[source]), fed(layer, []).numel()
            if wide % count or (isinstance(layer, nn.Conv2d) and wide != count):
                raise TypeError(f"layer {name!r} has {wide} inputs, which the {count} units of {source!r} do not fit")
    masks = {name: (torch.rand(units(layers[name])) < 0.5).to(inputs) for name in wiring.gated}
    gates = {wiring.gate_of(name): name for name in wiring.gated}

    def after(gate: str, output: Tensor) -> Tensor:
        return output * as_gate(masks[gates[gate]], output)

    def before(name: str, input: Tensor) -> None:
        closed = fed(layers[name], [masks[source] for source in wiring.places[name].sources]) == 0
        if input[:, closed].any():
            raise TypeError(
                f"an input of layer {name!r} is not 0 when the units that should feed it are closed: something between "
                f"{' and '.join(wiring.places[name].sources)} and it mixes units, or does not keep 0"
            )

    stations = {gate: network.get_submodule(gate) for gate in gates}
    with torch.no_grad(), _watched(network, before=(layers, before), after=(stations, after)):
        network(inputs, head)


@contextmanager
def _watched(
    network: nn.Module,
    *,
    before: tuple[Mapping[str, nn.Module], Callable[[str, Tensor], None]],
    after: tuple[Mapping[str, nn.Module], Callable[[str, Tensor], Tensor | None]],
) -> Iterator[None]:
    """In eval mode: tell of modules' inputs before, and of their outputs after they run; both by the module's name."""
    modes = {module: module.training for module in network.modules()}
    handles = [
        module.register_forward_pre_hook(lambda _, args, name=name: before[1](name, args[0]))
        for name, module in before[0].items()
    ] + [
        module.register_forward_hook(lambda _, args, output, name=name: after[1](name, output))
        for name, module in after[0].items()
    ]
    network.eval()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
