"""Calls of linear layers, for methods that project their gradients.

The gradient of a weight is D^T X, with D the gradient of the layer's output and X its input, a row for each example.
(D^T X) P = D^T (X P) for any P, and there are far fewer rows than outputs: so it costs the least to ask for D, and not
for the gradient of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Call(NamedTuple):
    """Of a linear layer; the output as it was before anything was done to it in place."""

    layer: str
    input: Tensor
    output: GradientEdge


@contextmanager
def recorded(layers: Mapping[str, nn.Module]) -> Iterator[list[Call]]:
    """Every call of these layers meanwhile, by the names that they are given."""
    calls: list[Call] = []
    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(_recorder(name, calls)).remove)
        yield calls


def _recorder(layer: str, calls: list[Call]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:
            calls.append(Call(layer, args[0], get_gradient_edge(output)))

    return hook
