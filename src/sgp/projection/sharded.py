"""Parameters of which each process has some rows (``fully_shard``, FSDP2), and the projections of their shards.

A projection acts on the input dimension of a weight. Where another dimension is sharded (linear layers, convolutions),
each process projects its own rows without communication. The rows of an embedding are its inputs, and each is scaled
by itself. Only a product over rows of several processes (GPT-2's Conv1D; a bias that is sharded at other rows than its
weight) is summed over the processes.

This module does not import DTensor or FSDP: a tensor can be a DTensor, and a model sharded, only where these are
imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from sgp.projection.layer_types import Block
from sgp.projection.subspace import Bases, Projector, Subspace, compute_coefficients
from sgp.projection.tokens import TokenSubspace

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class LocalRows:
    """The rows of a sharded parameter that this process has.

    Attributes:
        start: First row.
        stop: One past the last row.
        mesh: Device mesh of the processes that have rows of the parameter.
        mesh_dims: Dimensions of the mesh along which the rows are sharded.
    """

    start: int
    stop: int
    mesh: DeviceMesh
    mesh_dims: tuple[int, ...]

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Return the sum over all processes that have rows of the parameter. The tensor may be overwritten."""
        sent = tensor.to(self.mesh.device_type)
        for dimension in self.mesh_dims:
            dist.all_reduce(sent, group=self.mesh.get_group(dimension))
        return sent.to(tensor.device)

    def intersect(self, first: int, last: int) -> slice:
        """Return which of the parameter's rows from ``first`` to ``last`` are local, relative to ``first``."""
        start, stop = max(self.start, first), min(self.stop, last)
        return slice(start - first, stop - first) if start < stop else slice(0, 0)

    def shift(self, first: int, within: slice) -> tuple[int, int]:
        """Return a result of :meth:`intersect` relative to the first local row."""
        if within.start == within.stop:
            return 0, 0
        return first + within.start - self.start, first + within.stop - self.start


def as_dtensor(tensor: Tensor) -> DTensor | None:
    """Return a tensor that is distributed over processes; None for any other tensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def get_local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process has: a detached view."""
    distributed = as_dtensor(tensor)
    if distributed is None:
        return tensor.detach()
    with torch.no_grad():
        return distributed.to_local().detach()


def gather_whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered if it is distributed; every process must call this."""
    distributed = as_dtensor(tensor)
    return tensor.detach() if distributed is None else distributed.full_tensor().detach()


def distribute_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a whole tensor in the layout of a parameter; a distributed tensor is returned as it is."""
    like = as_dtensor(parameter)
    if like is None or as_dtensor(tensor) is not None:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def find_local_rows(parameter: Tensor) -> LocalRows | None:
    """Return the rows of a parameter that are local; None if every process has all of them."""
    distributed = as_dtensor(parameter)
    if distributed is None:
        return None
    mesh = distributed.device_mesh
    start, count, mesh_dims = 0, parameter.shape[0], []
    for dimension, placement in enumerate(distributed.placements):
        if placement.is_shard():  # rows are divided as by torch.chunk: the last shards may be smaller, or empty
            size = -(-count // mesh.size(dimension))
            first = min(mesh.get_local_rank(dimension) * size, count)
            start, count = start + first, min(size, count - first)
            mesh_dims.append(dimension)
    return LocalRows(start, start + count, mesh, tuple(mesh_dims)) if mesh_dims else None


def check_layout(name: str, parameter: Tensor, *, by_fsdp: bool, weight: Tensor | None = None) -> None:
    """Raise if a parameter is sharded in a way that steps cannot project.

    Args:
        name: Name of the parameter.
        parameter: The parameter.
        by_fsdp: Whether ``fully_shard`` was called on a module of the model.
        weight: Weight of the layer whose bias the parameter is; None if it is no bias.

    Raises:
        TypeError: The parameter is sharded in such a way.
    """
    if getattr(parameter, "_fsdp_flattened", False):
        raise TypeError(
            f"parameter {name!r} is part of a flat parameter (FullyShardedDataParallel), without rows and columns: "
            "shard the model with torch.distributed.fsdp.fully_shard instead"
        )
    placements = _layout(parameter)[1]
    for placement in placements:
        # A strided shard is another type, and its rows are not contiguous.
        kind = type(placement).__name__
        if kind != "Replicate" and not (kind == "Shard" and placement.dim == 0):
            raise TypeError(
                f"parameter {name!r} has the placements {placements}, and only Shard(dim=0) and Replicate() can be "
                "projected: shard it by rows, or exclude it"
            )
    if find_local_rows(parameter) is not None and not by_fsdp:
        raise TypeError(
            f"parameter {name!r} is distributed over processes, but fully_shard was not called on any module of this "
            "model: call it on the model of the memory, or exclude parameters that are distributed in another way, "
            "such as by tensor parallelism"
        )
    if weight is not None and not has_same_layout(weight, parameter):
        raise TypeError(
            f"parameter {name!r} has the placements {placements}, the weight of its layer {_layout(weight)[1]}: shard "
            "both in the same way, exclude the bias, or set bias='freeze'"
        )


def has_same_layout(tensor: Tensor, parameter: Tensor) -> bool:
    """Return whether two tensors have the same mesh and placements, or both are plain."""
    return _layout(tensor) == _layout(parameter)


def _layout(parameter: Tensor) -> tuple[DeviceMesh | None, tuple[Any, ...]]:
    distributed = as_dtensor(parameter)
    return (None, ()) if distributed is None else (distributed.device_mesh, tuple(distributed.placements))


def find_fsdp_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that ``fully_shard`` was called on."""
    module = sys.modules.get("torch.distributed.fsdp")
    return [] if module is None else [unit for unit in model.modules() if isinstance(unit, module.FSDPModule)]


def reshard(units: Iterable[nn.Module]) -> None:
    """Replace gathered parameters by their shards; after a forward pass the outermost module would keep them."""
    for unit in units:
        unit.reshard()  # type: ignore[operator]


def cut_to_shard(
    block: Block,
    space: Bases,
    weight: torch.Size,
    rows: LocalRows,
    bias: torch.Size | None,
    bias_rows: LocalRows | None,
) -> tuple[Block, Projector]:
    """Restrict a block and its subspace to the shard that one process has.

    Args:
        block: Block of the whole weight.
        space: Subspace of all of its inputs.
        weight: Shape of the whole weight.
        rows: Rows of the weight that the process has.
        bias: Shape of the whole bias; None if no bias is protected with the weight.
        bias_rows: Rows of the bias that the process has.

    Returns:
        The block within the shard, and what projects it.
    """
    if isinstance(space, TokenSubspace):
        return block, space.select_tokens(rows.start, rows.stop)
    assert isinstance(space, Subspace)
    if block.input_dim == 0:
        outputs = weight[1:].numel()
        own_bias = None if bias_rows is None else bias_rows.intersect(0, outputs)
        return block, ScatteredSubspace(space, rows, outputs, slice(0, outputs), slice(rows.start, rows.stop), own_bias)
    first, last, _ = slice(*block.rows).indices(weight[0])
    local = rows.intersect(first, last)
    cut = replace(block, rows=rows.shift(first, local), bias_rows=None)
    if bias is not None and bias_rows is not None:
        bias_first, bias_last, _ = slice(*(block.bias_rows or block.rows)).indices(bias[0])
        own_bias = bias_rows.intersect(bias_first, bias_last)
        cut = replace(cut, bias_rows=bias_rows.shift(bias_first, own_bias))
        if (weight[0], first) != (bias[0], bias_first):
            return cut, ScatteredSubspace(space, rows, last - first, local, slice(0, weight[1:].numel()), own_bias)
    if block.groups == 1:
        return cut, space
    size = (last - first) // block.groups
    groups = slice(local.start // size, max(-(-local.stop // size), local.start // size + 1))
    before, after = local.start - groups.start * size, groups.stop * size - local.stop
    cut = replace(cut, groups=groups.stop - groups.start)
    if before or after:
        cut = _CutGroups(**vars(cut), before=before, after=after)
    return cut, space.select_groups(groups)


@dataclass(frozen=True)
class _CutGroups(Block):
    """Local rows of a grouped block that may begin and end inside a group: rows of other processes count as zeros.

    Attributes:
        before: Number of rows of the first group that are not local.
        after: Number of rows of the last group that are not local.
    """

    before: int = 0
    after: int = 0

    def view_matrix(self, weight: Tensor) -> Tensor:
        part = weight[slice(*self.rows)].flatten(1)
        return F.pad(part, (0, 0, self.before, self.after)).reshape(self.groups, -1, part.shape[1])

    def view_bias(self, bias: Tensor) -> Tensor:
        return F.pad(bias[slice(*(self.bias_rows or self.rows))], (self.before, self.after)).reshape(self.groups, -1)

    def write_matrix(self, weight: Tensor, matrix: Tensor) -> None:
        super().write_matrix(weight, self._select_local(matrix.flatten(0, 1)))

    def write_bias(self, bias: Tensor, vector: Tensor) -> None:
        super().write_bias(bias, self._select_local(vector.flatten()))

    def _select_local(self, rows: Tensor) -> Tensor:
        return rows[self.before : len(rows) - self.after]


class ScatteredSubspace(Projector):
    """A subspace for a weight, or a weight and its bias, whose shards on several processes enter one product.

    Each process writes the coefficients of its own shard into a matrix of zeros; the sum of these matrices over the
    processes has the coefficients of the whole.

    Args:
        space: The whole subspace.
        rows: Local rows of the weight.
        outputs: Number of outputs on all processes.
        own_outputs: Outputs of the local weight.
        own_inputs: Inputs of the local weight.
        own_bias: Outputs whose bias is local; None if no bias is protected.
    """

    def __init__(
        self,
        space: Subspace,
        rows: LocalRows,
        outputs: int,
        own_outputs: slice,
        own_inputs: slice,
        own_bias: slice | None,
    ) -> None:
        self.importance = space.importance
        self._rows = rows
        self._outputs = outputs
        self._own_outputs = own_outputs
        self._own_bias = own_bias
        self._basis = space.basis[:, own_inputs]
        self._constant = space.basis[:, -1:]  # the constant input of a bias, if there is one

    def subtract_projection_(
        self, source: Tensor, source_bias: Tensor | None, target: Tensor, target_bias: Tensor | None
    ) -> None:
        coefficients = self._compute_coefficients(source, source_bias)
        coefficients *= self.importance.unsqueeze(1)
        target.baddbmm_(coefficients[:, self._own_outputs], self._basis.mT, alpha=-1)
        if target_bias is not None:
            target_bias -= (coefficients[:, self._own_bias] * self._constant).sum(-1)

    def compute_blocked_share(self, matrix: Tensor, bias: Tensor | None = None) -> float:
        blocked = self._compute_coefficients(matrix, bias) * (self.importance == 1).unsqueeze(1)
        size = float(self._rows.sum_over_ranks(matrix.square().sum()).sqrt())
        return float(blocked.norm()) / max(size, torch.finfo(matrix.dtype).tiny)

    def _compute_coefficients(self, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """Return the coefficients of weight and bias of all processes along each basis. [1, outputs, k]."""
        found = matrix.new_zeros(1, self._outputs, self._basis.shape[2])
        found[:, self._own_outputs] = compute_coefficients(self._basis, matrix, None)
        if bias is not None:
            found[:, self._own_bias] += bias.unsqueeze(-1) * self._constant
        return self._rows.sum_over_ranks(found)
