"""Record the calls of layers, for methods that need the gradients of their outputs.

The gradient of a weight is D^T X, with D the gradient of the layer's output and X its input, one row per example.
(D^T X) P = D^T (X P) for any P, and there are far fewer rows than outputs: so it is cheapest to compute D, and not the
gradient of the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Call(NamedTuple):
    """A call of a layer.

    Attributes:
        layer: Name of the layer.
        input: Input of the layer.
        output: The output as it was before any in-place change; None if it has no graph.
    """

    layer: str
    input: Tensor
    output: GradientEdge | None


@contextmanager
def record_calls(layers: Mapping[str, nn.Module]) -> Iterator[list[Call]]:
    """Record every call of some layers inside the context, under the names that are given."""
    calls: list[Call] = []

    def record(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        given = args[0] if args else kwargs["input"]
        calls.append(Call(name, given, get_gradient_edge(output) if output.requires_grad else None))

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(record, name), with_kwargs=True))
        yield calls


def compute_gradients(
    loss: Tensor,
    weights: Mapping[str, Tensor],
    calls: Sequence[Call] = (),
    *,
    create_graph: bool = False,
    retain_graph: bool | None = None,
) -> tuple[dict[str, Tensor], list[tuple[Call, Tensor]]]:
    """Compute the gradients of a loss, leaving `.grad` alone.

    Args:
        loss: Loss.
        weights: Weights to differentiate with respect to, by name.
        calls: Calls to differentiate with respect to the outputs of.
        create_graph: Whether the gradients have a graph.
        retain_graph: Whether the graph is kept; by default, if the gradients have one.

    Returns:
        The gradients of weights by name and the calls with the gradients of their outputs, as far as the loss depends
        on them.
    """
    with_graph = [call for call in calls if call.output is not None]
    edges: list[Any] = [*weights.values(), *(call.output for call in with_graph)]  # torch accepts both together
    if not edges:
        return {}, []
    found = torch.autograd.grad(loss, edges, retain_graph=retain_graph, create_graph=create_graph, allow_unused=True)
    gradients = {name: each for name, each in zip(weights, found, strict=False) if each is not None}
    pairs = zip(with_graph, found[len(weights) :], strict=True)
    return gradients, [(call, each) for call, each in pairs if each is not None]
