"""Parameters that are sharded by rows (``fully_shard``, FSDP2), and the projection of their shards.

A projection acts on the input dimension of a weight. Where another dimension is sharded (linear layers, convolutions),
each process projects its own rows without communication. The rows of an embedding are its inputs, and each row is
scaled independently. The change of the whole layer is gathered only where shards of several processes enter one product
(GPT-2's Conv1D, grouped convolutions, a bias that is sharded at other rows than its weight).

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

from sgp.projection.layer_types import Block
from sgp.projection.subspace import Bases
from sgp.projection.tokens import TokenSubspace

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class LocalRows:
    """Rows of a sharded parameter that this process has.

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
        """Return the sum of a tensor over all processes that have rows of the parameter. May overwrite the tensor."""
        sent = tensor.to(self.mesh.device_type)
        for dimension in self.mesh_dims:
            dist.all_reduce(sent, group=self.mesh.get_group(dimension))
        return sent.to(tensor.device)


def as_dtensor(tensor: Tensor) -> DTensor | None:
    """Return a tensor as a DTensor if it is one; otherwise None."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def get_local(tensor: Tensor) -> Tensor:
    """Return a detached view of the part of a tensor that this process has."""
    distributed = as_dtensor(tensor)
    if distributed is None:
        return tensor.detach()
    with torch.no_grad():
        return distributed.to_local().detach()


def gather_whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered if it is distributed. Every process must call this."""
    distributed = as_dtensor(tensor)
    return tensor.detach() if distributed is None else distributed.full_tensor().detach()


def gather_shards(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Gather a tensor whose local part on each process is sharded like a distributed parameter.

    Every process must call this.
    """
    like = as_dtensor(parameter)
    assert like is not None
    from torch.distributed.tensor import DTensor

    mesh = like.device_mesh
    shards = DTensor.from_local(
        tensor.to(mesh.device_type), mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return shards.full_tensor().to(tensor.device)


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
    """Raise if a parameter is sharded in a way in which its steps cannot be projected.

    Args:
        name: Name of the parameter.
        parameter: The parameter.
        by_fsdp: Whether ``fully_shard`` was called on a module of the model.
        weight: Weight of the layer that has the parameter as its bias; None if the parameter is not a bias.

    Raises:
        TypeError: The sharding of the parameter is not supported.
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
    """Return whether two tensors have the same mesh and placements, or both are plain tensors."""
    return _layout(tensor) == _layout(parameter)


def _layout(parameter: Tensor) -> tuple[DeviceMesh | None, tuple[Any, ...]]:
    distributed = as_dtensor(parameter)
    return (None, ()) if distributed is None else (distributed.device_mesh, tuple(distributed.placements))


def find_fsdp_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that ``fully_shard`` was called on."""
    module = sys.modules.get("torch.distributed.fsdp")
    return [] if module is None else [unit for unit in model.modules() if isinstance(unit, module.FSDPModule)]


def reshard(units: Iterable[nn.Module]) -> None:
    """Replace gathered parameters by their shards. The outermost module keeps them gathered after a forward pass."""
    for unit in units:
        unit.reshard()  # type: ignore[operator]


def cut_to_shard(
    block: Block, bases: Bases, weight: torch.Size, rows: LocalRows, bias: torch.Size | None
) -> tuple[Block, Bases] | None:
    """Restrict a block and its subspace to the shard that one process has.

    Args:
        block: Block of the whole weight.
        bases: Subspace of all inputs of the block.
        weight: Shape of the whole weight.
        rows: Rows of the weight that the process has.
        bias: Shape of the whole bias, which is sharded like the weight; None if no bias is protected with the weight.

    Returns:
        The block within the shard and its bases; None if shards of several processes enter one product.
    """
    if isinstance(bases, TokenSubspace):
        return block, bases.select_tokens(rows.start, rows.stop)
    first, last, _ = slice(*block.rows).indices(weight[0])
    if bias is not None:
        bias_first, _, _ = slice(*(block.bias_rows or block.rows)).indices(bias[0])
        if (weight[0], first) != (bias[0], bias_first):
            return None
    if block.input_dim == 0 or block.groups > 1:
        return None
    start, stop = max(rows.start, first) - rows.start, min(rows.stop, last) - rows.start
    return replace(block, rows=(start, stop) if start < stop else (0, 0), bias_rows=None), bases
