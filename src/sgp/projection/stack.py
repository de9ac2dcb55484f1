"""Project many small layers at once: for them the calls cost more than the products."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional as F

from sgp.projection.layer import ProtectedLayer
from sgp.projection.sharded import find_local_rows
from sgp.projection.subspace import Subspace

# Weights of at most this many elements are stacked; for wider layers the products dominate.
LARGEST = 128 * 128
# Layers are padded to the largest of their stack as long as that multiplies their size by at most this.
PADDING = 1.3


class LayerStack:
    """Small layers whose changes are projected by one pair of batched products, padded with zeros to one shape.

    Args:
        layers: Layers for which :func:`can_stack` is true.

    Attributes:
        tensors: Weights and protected biases of the layers.
        views: For each of ``tensors`` its part of the buffer, which holds the changes to be projected.
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
        """Subtract from the targets, in place, what the subspaces block of the buffer (Eq. 3).

        The buffer is used up.

        Args:
            targets: Tensors in the shapes of ``tensors``.
            sign: -1 if the buffer holds the negative of the change.
        """
        if any(layer.subspace is not known for layer, known in zip(self.layers, self._subspaces, strict=False)):
            self._subspaces = []
        if not self._subspaces:
            self._prepare_factors()
        if len(self._factors) == 1:
            blocked = self._cut(torch.bmm(self._buffer, self._factors[0]))
        else:  # written over the change, which is not needed any more: one buffer less in the caches
            torch.bmm(torch.bmm(self._buffer, self._factors[0]), self._factors[1], out=self._buffer)
            blocked = self.views
        torch._foreach_sub_(targets, blocked, alpha=sign)

    def follow_weights(self) -> None:
        """Move the buffer to where the weights are now, and to their type: a model may move between two steps."""
        weight = self.layers[0].weight.tensor
        if (self._buffer.device, self._buffer.dtype) != (weight.device, weight.dtype):
            self._buffer = self._buffer.to(weight.device, weight.dtype)
            self._blocked = torch.empty_like(self._buffer)
            self.views, self._blocked_views = self._cut(self._buffer), self._cut(self._blocked)
            self.tensors = [parameter.tensor for parameter in self.parameters]
            self._subspaces = []  # so that the factors are made anew

    def _cut(self, stack: Tensor) -> list[Tensor]:
        """Return the part of a stack for each weight and bias, in the shape of the parameter."""
        parts = []
        for matrix, layer in zip(stack, self.layers, strict=True):
            weight = layer.weight.tensor
            inputs = weight.shape[1:].numel()
            parts.append(matrix[: weight.shape[0], :inputs].unflatten(1, weight.shape[1:]))
            if layer.bias is not None:
                parts.append(matrix[: weight.shape[0], inputs])
        return parts

    def _prepare_factors(self) -> None:
        """Stack M and Lambda M^T of the layers, or M Lambda M^T once that is the cheaper product."""
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
    """Return whether a layer is small and plain enough to be projected in a stack."""
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
    """Group small layers of about one size into stacks.

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
    """Group layers so that padding to the largest of a group costs little."""

    def measure(layer: ProtectedLayer) -> tuple[int, int]:
        return layer.weight.tensor.shape[0], layer.dimension

    groups: list[list[ProtectedLayer]] = []
    sizes: list[tuple[int, int]] = []
    for layer in sorted(layers, key=lambda layer: (lambda size: size[0] * size[1])(measure(layer)), reverse=True):
        out, dimension = measure(layer)
        for position, (most, widest) in enumerate(sizes):
            padded = max(most, out), max(widest, dimension)
            members = [measure(member) for member in groups[position]]
            if all(padded[0] * padded[1] <= PADDING * a * b for a, b in [*members, (out, dimension)]):
                groups[position].append(layer)
                sizes[position] = padded
                break
        else:
            groups.append([layer])
            sizes.append((out, dimension))
    return groups
