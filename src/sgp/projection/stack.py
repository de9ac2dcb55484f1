"""Project many small layers at once: for these the calls cost more than the products."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional as F

from sgp.projection.layer import ProtectedLayer
from sgp.projection.sharded import find_local_rows
from sgp.projection.subspace import Subspace

# Largest number of elements of a weight that is stacked; for wider layers the products dominate.
LARGEST = 128 * 128
# Largest factor by which padding to the shape of a stack may increase the size of a layer.
PADDING = 1.3


class LayerStack:
    """Small layers whose changes are projected by one pair of batched products, zero-padded to one shape.

    Args:
        layers: Layers for which :func:`can_stack` is true.

    Attributes:
        tensors: Weights and protected biases of the layers.
        views: Views of the buffer in the shapes of ``tensors``, which hold the changes to be projected.
    """

    def __init__(self, layers: Sequence[ProtectedLayer]) -> None:
        self.layers = list(layers)
        self.parameters = [parameter for layer in layers for parameter in layer.parameters]
        self.tensors: list[Tensor] = [parameter.tensor for parameter in self.parameters]
        first = self.layers[0].weight.tensor
        out = max(layer.weight.tensor.shape[0] for layer in layers)
        dimension = max(layer.dimension for layer in layers)
        self._buffer = first.new_zeros(len(layers), out, dimension)
        self.views = self._cut(self._buffer)
        self._subspaces: list[Subspace] = []
        self._factors: list[Tensor] = []

    def subtract_projection_(self, targets: list[Tensor], *, sign: float = 1.0) -> None:
        """Subtract the part of the buffer that the subspaces block from the targets, in place (Eq. 3).

        The buffer is overwritten.

        Args:
            targets: Tensors in the shapes of ``tensors``.
            sign: -1 if the buffer holds the negative of the change.
        """
        is_known = bool(self._subspaces)
        if not is_known or any(layer.subspace is not s for layer, s in zip(self.layers, self._subspaces, strict=True)):
            self._prepare_factors()
        if len(self._factors) == 1:
            blocked = self._cut(torch.bmm(self._buffer, self._factors[0]))
        else:  # the change is overwritten: one buffer less in the caches
            torch.bmm(torch.bmm(self._buffer, self._factors[0]), self._factors[1], out=self._buffer)
            blocked = self.views
        torch._foreach_sub_(targets, blocked, alpha=sign)

    def follow_weights(self) -> None:
        """Move the buffer to the device and type of the weights: a model may be moved between two steps."""
        weight = self.layers[0].weight.tensor
        if (self._buffer.device, self._buffer.dtype) != (weight.device, weight.dtype):
            self._buffer = self._buffer.to(weight.device, weight.dtype)
            self.views = self._cut(self._buffer)
            self.tensors = [parameter.tensor for parameter in self.parameters]
            self._subspaces = []  # so that the factors are computed again

    def _cut(self, stack: Tensor) -> list[Tensor]:
        """Return a view of a stack for each weight and bias, in the shape of the parameter."""
        parts = []
        for matrix, layer in zip(stack, self.layers, strict=True):
            weight = layer.weight.tensor
            inputs = weight.shape[1:].numel()
            parts.append(matrix[: weight.shape[0], :inputs].unflatten(1, weight.shape[1:]))
            if layer.bias is not None:
                parts.append(matrix[: weight.shape[0], inputs])
        return parts

    def _prepare_factors(self) -> None:
        """Stack M and Lambda M^T of the layers, or M Lambda M^T if that is the cheaper product."""
        dimension = self._buffer.shape[2]
        bases, weighted = [], []
        rank = max(layer.subspace.width for layer in self.layers if layer.subspace is not None)
        for layer in self.layers:
            subspace = layer.get_bases()
            assert isinstance(subspace, Subspace)
            padding = (0, rank - subspace.width, 0, dimension - subspace.dimension)
            bases.append(F.pad(subspace.basis[0], padding))
            weighted.append(F.pad(subspace.basis[0] * subspace.importance, padding).mT)
        factors = [torch.stack(bases), torch.stack(weighted)]
        self._factors = [factors[0] @ factors[1]] if 2 * rank > dimension else factors
        self._subspaces = [layer.subspace for layer in self.layers if isinstance(layer.subspace, Subspace)]


def can_stack(layer: ProtectedLayer) -> bool:
    """Return whether a layer is small, and its block a whole unsharded weight, so that it can be stacked."""
    block, weight = layer.block, layer.weight.tensor
    is_whole = block.groups == 1 and block.input_dim == 1 and block.rows == (0, None) and block.bias_rows is None
    return (
        is_whole
        and not layer.is_two_sided
        and isinstance(layer.subspace, Subspace)
        and not layer.subspace.is_compressed
        and weight.numel() <= LARGEST
        and all(p.tensor.dtype in (torch.float32, torch.float64) for p in layer.parameters)
        and all(find_local_rows(p.tensor) is None for p in layer.parameters)
    )


def stack_layers(layers: Sequence[ProtectedLayer]) -> tuple[list[LayerStack], list[ProtectedLayer]]:
    """Group small layers of similar sizes into stacks.

    Args:
        layers: Layers to project.

    Returns:
        The stacks, and the layers that are projected one by one.
    """
    stackable: dict[tuple[torch.dtype, torch.device], list[ProtectedLayer]] = {}
    for layer in layers:
        if can_stack(layer):
            weight = layer.weight.tensor
            stackable.setdefault((weight.dtype, weight.device), []).append(layer)
    groups = list(chain.from_iterable(map(_group_by_size, stackable.values())))
    stacks = [LayerStack(group) for group in groups if len(group) > 1]
    stacked = {layer for stack in stacks for layer in stack.layers}
    return stacks, [layer for layer in layers if layer not in stacked]


def _group_by_size(layers: Sequence[ProtectedLayer]) -> list[list[ProtectedLayer]]:
    """Return groups of layers in which padding to the largest layer costs little."""
    groups: list[list[ProtectedLayer]] = []
    for layer in sorted(layers, key=lambda layer: _measure_padded([layer]), reverse=True):
        largest = PADDING * _measure_padded([layer])  # the other members of a group are at least as large
        group = next((group for group in groups if _measure_padded([*group, layer]) <= largest), None)
        if group is None:
            groups.append([layer])
        else:
            group.append(layer)
    return groups


def _measure_padded(layers: Sequence[ProtectedLayer]) -> int:
    """Return the number of elements of each layer after padding to the shape of the largest."""
    return max(layer.weight.tensor.shape[0] for layer in layers) * max(layer.dimension for layer in layers)
