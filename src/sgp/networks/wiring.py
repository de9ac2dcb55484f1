"""Find which units of a network feed which inputs of its layers, by running it, and where units can be gated.

A unit is one output of an `nn.Linear` or one channel of an `nn.Conv2d`. Its gate is behind the BatchNorm that follows
its layer directly, since the norm would undo a gate before it, and otherwise right behind the layer, since the next
module may mix channels (LeNet's response normalization). Gates are not negative: they pass through ReLU, pooling and
dropout.

Where outputs of several layers are added, as around a residual block, an input is fed by the units of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sgp.patterns import find_pattern

Layer = nn.Linear | nn.Conv2d
# Marks a layer that reads the network's own input, beside the names of layers.
INPUT = ""


@dataclass(frozen=True)
class Place:
    """A layer among the others.

    Attributes:
        norm: Name of the BatchNorm that follows the layer directly; None if there is none.
        sources: Names of the layers whose units are this layer's input, possibly added; empty if the layer reads the
            network's own input.
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
        sources = {source for place in self.places.values() for source in place.sources}
        return [name for name in self.places if name in sources]

    def get_gate(self, name: str) -> str:
        """Return the name of the module behind which a layer's units are gated."""
        return self.places[name].norm or name

    def to_dict(self) -> dict[str, Any]:
        """Return the wiring as strings, lists and dictionaries."""
        return {name: {"norm": place.norm, "sources": list(place.sources)} for name, place in self.places.items()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Wiring:
        """Create a wiring from the result of `to_dict`."""
        return cls({name: Place(each["norm"], tuple(each["sources"])) for name, each in plain.items()})


def get_layer(network: nn.Module, name: str) -> Layer:
    """Return a linear layer or convolution of a network by its name."""
    layer = network.get_submodule(name)
    assert isinstance(layer, Layer)
    return layer


def count_units(layer: Layer) -> int:
    """Return the number of units of a layer."""
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def mask_inputs(layer: Layer, masks: Sequence[Tensor]) -> Tensor:
    """Return, for each input of a layer, the largest mask of the units that feed it; ones if `masks` is empty.

    Between a convolution and a linear layer, each channel feeds consecutive inputs, one for each pixel.

    Args:
        layer: Layer whose inputs are masked.
        masks: Masks of the units of each source, [units].
    """
    inputs = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    spread = [mask.repeat_interleave(inputs // len(mask)) for mask in masks]
    return torch.stack(spread).amax(dim=0) if spread else layer.weight.new_ones(inputs)


def reshape_gate(mask: Tensor, output: Tensor) -> Tensor:
    """Reshape a mask [units], or [n, units], so that it can be multiplied by an output [n, units, ...]."""
    return mask.reshape(*mask.shape, *[1] * (output.dim() - 2))


def find_wiring(network: nn.Module, inputs: Tensor, head: int, *, exclude: Sequence[str] = ()) -> Wiring:
    """Find the wiring of a network by running it on a few inputs in eval mode; a check draws random numbers.

    Args:
        network: Module that is called as `network(inputs, head)`.
        inputs: Two or more inputs.
        head: Index of the head to run.
        exclude: Patterns on the names of modules whose units are not gated, such as task heads.

    Raises:
        TypeError: Gates would change what the network computes; the message says why.
    """
    modules = dict(network.named_modules())
    layers: dict[str, Layer] = {name: each for name, each in modules.items() if isinstance(each, Layer)}
    norms = {name: each for name, each in modules.items() if isinstance(each, _BatchNorm)}
    included = [name for name in modules if not find_pattern(name, exclude)]
    for name in included:
        if name not in layers and name not in norms and any(True for _ in modules[name].parameters(recurse=False)):
            raise TypeError(
                f"{name!r} is of type {type(modules[name]).__name__}: only Linear, Conv2d and BatchNorm can be gated"
            )
    owners = _find_norm_owners(network, layers, norms, inputs, head)
    for name in included:
        if name in norms and name not in owners:
            raise TypeError(f"BatchNorm {name!r} does not follow a layer directly: no gate can stand behind both")
    norm_of = {layer: norm for norm, layer in owners.items()}
    inner = [name for name in included if name in layers]
    sources = _find_sources(network, layers, {norm_of.get(name, name): name for name in inner}, inputs, head)
    # A layer that was not run, or that reads the network's own input beside others, has an input without gates.
    places = {
        name: Place(norm_of.get(name), () if INPUT in found else tuple(each for each in inner if each in found))
        for name, found in sources.items()
    }
    wiring = Wiring(places)
    _check_gates(network, layers, wiring, inputs, head)
    return wiring


def _find_norm_owners(
    network: nn.Module, layers: Iterable[str], norms: Iterable[str], inputs: Tensor, head: int
) -> dict[str, str]:
    """Return the layer whose output each norm reads; norms that read something else are left out."""
    # The tensors are kept, so that no later one gets the same id.
    outputs: dict[int, tuple[Tensor, str]] = {}
    owners: dict[str, str] = {}

    def after(name: str, output: Tensor) -> None:
        outputs[id(output)] = (output, name)

    def before(name: str, input: Tensor) -> None:
        if id(input) in outputs:
            owners[name] = outputs[id(input)][1]

    with torch.no_grad(), _hooks(network, before=(norms, before), after=(layers, after)):
        network(inputs, head)
    return owners


def _find_sources(
    network: nn.Module, layers: Iterable[str], gates: Mapping[str, str], inputs: Tensor, head: int
) -> dict[str, set[str]]:
    """Return the layers from which each layer's input is computed, with no layer in between.

    The graph is cut behind each gate and continued from a new leaf, so that the leaves under a layer's input are its
    sources.

    Args:
        network: Network to run.
        layers: Names of the layers.
        gates: Layer of each module behind which units are gated.
        inputs: Inputs of the network.
        head: Index of the head to run.
    """
    leaves: dict[int, tuple[Tensor, str]] = {}
    sources: dict[str, set[str]] = {name: set() for name in layers}

    def cut(value: Tensor, name: str) -> Tensor:
        leaf = value.detach().requires_grad_(value.is_floating_point())
        leaves[id(leaf)] = (leaf, name)
        return leaf.clone()  # a leaf cannot be changed in place, as ReLU does

    def after(gate: str, output: Tensor) -> Tensor:
        return cut(output, gates[gate])

    def before(name: str, input: Tensor) -> None:
        if input.dim() not in (2, 4):
            raise TypeError(
                f"layer {name!r} has an input of shape {tuple(input.shape)}: units need [n, units] or [n, units, h, w]"
            )
        visited: set[Any] = set()
        pending = [input.grad_fn]
        while pending:
            node = pending.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            leaf = getattr(node, "variable", None)
            if id(leaf) in leaves:
                sources[name].add(leaves[id(leaf)][1])
            pending += [following for following, _ in node.next_functions]

    with torch.enable_grad(), _hooks(network, before=(layers, before), after=(gates, after)):
        network(cut(inputs, INPUT), head)
    return sources


def _check_gates(network: nn.Module, layers: Mapping[str, Layer], wiring: Wiring, inputs: Tensor, head: int) -> None:
    """Close half of all gates: an input that is fed by closed units only must be 0, whatever the open ones do."""
    for name, place in wiring.places.items():
        layer = layers[name]
        for source in place.sources:
            count, wide = count_units(layers[source]), mask_inputs(layer, []).numel()
            if wide % count or (isinstance(layer, nn.Conv2d) and wide != count):
                raise TypeError(f"layer {name!r} has {wide} inputs, which the {count} units of {source!r} do not fit")
    masks = {name: (torch.rand(count_units(layers[name])) < 0.5).to(inputs) for name in wiring.gated}
    gates = {wiring.get_gate(name): name for name in wiring.gated}

    def after(gate: str, output: Tensor) -> Tensor:
        return output * reshape_gate(masks[gates[gate]], output)

    def before(name: str, input: Tensor) -> None:
        sources = wiring.places[name].sources
        closed = mask_inputs(layers[name], [masks[source] for source in sources]) == 0
        if input[:, closed].any():
            raise TypeError(
                f"an input of layer {name!r} is not 0 when the units that feed it are closed: a module between "
                f"{' and '.join(sources)} and it mixes units, or does not preserve 0"
            )

    with torch.no_grad(), _hooks(network, before=(layers, before), after=(gates, after)):
        network(inputs, head)


@contextmanager
def _hooks(
    network: nn.Module,
    *,
    before: tuple[Iterable[str], Callable[[str, Tensor], None]],
    after: tuple[Iterable[str], Callable[[str, Tensor], Tensor | None]],
) -> Iterator[None]:
    """Enter eval mode, and call functions with the name and input of modules, or with their name and output."""
    modes = {module: module.training for module in network.modules()}
    with ExitStack() as stack:
        for name in before[0]:
            module = network.get_submodule(name)
            stack.enter_context(module.register_forward_pre_hook(lambda _, args, name=name: before[1](name, args[0])))
        for name in after[0]:
            module = network.get_submodule(name)
            stack.enter_context(module.register_forward_hook(lambda _, args, output, name=name: after[1](name, output)))
        network.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
