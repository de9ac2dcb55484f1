"""Weights of which each process has some rows only (``fully_shard``, FSDP2), and what a step does with those.

A projection acts on a weight's input side. Where that is not the side that is cut (linear layers, convolutions), every
process projects its own rows and tells nobody. The rows of an embedding are its inputs, and each is scaled by itself.
Only a product that runs over rows of several processes (GPT-2's Conv1D; a bias that is cut elsewhere than its weight)
is summed over them.

Neither DTensor nor FSDP is loaded here: a tensor can be one, and a model sharded, only where somebody else has.
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
    """The rows of a parameter that this process has.

    Attributes:
        start: the first of them.
        stop: one past the last.
        mesh: of the processes that have the others.
        cut: the dimensions of that mesh along which they are spread.
    """

    start: int
    stop: int
    mesh: DeviceMesh
    cut: tuple[int, ...]

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """The sum over all processes that have rows of the parameter, the same on each; the tensor may become it."""
        sent = tensor.to(self.mesh.device_type)
        for dimension in self.cut:
            dist.all_reduce(sent, group=self.mesh.get_group(dimension))
        return sent.to(tensor.device)

    def intersect(self, first: int, last: int) -> slice:
        """Which of some of the parameter's rows are here, counted from the first of those."""
        start, stop = max(self.start, first), min(self.stop, last)
        return slice(start - first, stop - first) if start < stop else slice(0, 0)

    def shift(self, first: int, within: slice) -> tuple[int, int]:
        """What :meth:`intersect` gave, counted from the first row that is here."""
        if within.start == within.stop:
            return 0, 0
        return first + within.start - self.start, first + within.stop - self.start


def as_dtensor(tensor: Tensor) -> DTensor | None:
    """A tensor that is spread over processes as such; None for any other."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def get_local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor: all of it unless it is spread over several. Shares memory, has no history."""
    spread = as_dtensor(tensor)
    if spread is None:
        return tensor.detach()
    with torch.no_grad():
        return spread.to_local().detach()


def gather_whole(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered where it is spread; every process must ask."""
    spread = as_dtensor(tensor)
    return tensor.detach() if spread is None else spread.full_tensor().detach()


def distribute_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor spread as a parameter is; what is spread already stays as it is."""
    like = as_dtensor(parameter)
    if like is None or as_dtensor(tensor) is not None:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def find_local_rows(parameter: Tensor) -> LocalRows | None:
    """Which rows of a parameter are here; None where that is all of them on every process."""
    spread = as_dtensor(parameter)
    if spread is None:
        return None
    mesh = spread.device_mesh
    start, count, cut = 0, parameter.shape[0], []
    for dimension, placement in enumerate(spread.placements):
        if placement.is_shard():  # as torch.chunk cuts: the last pieces may be smaller, or empty
            size = -(-count // mesh.size(dimension))
            first = min(mesh.get_local_rank(dimension) * size, count)
            start, count = start + first, min(size, count - first)
            cut.append(dimension)
    return LocalRows(start, start + count, mesh, tuple(cut)) if cut else None


def check_layout(name: str, parameter: Tensor, *, by_fsdp: bool, weight: Tensor | None = None) -> None:
    """Raise if a parameter is spread in a way that steps cannot deal with.

    Args:
        name: of the parameter.
        parameter: any.
        by_fsdp: whether ``fully_shard`` was called on a module of the model.
        weight: of the layer whose bias the parameter is, if it is one.
    """
    if getattr(parameter, "_fsdp_flattened", False):
        raise TypeError(
            f"parameter {name!r} is part of a flat one (FullyShardedDataParallel), without rows and columns: shard the "
            "model with torch.distributed.fsdp.fully_shard instead"
        )
    placements = _layout(parameter)[1]
    for placement in placements:
        # A strided shard is another type, and its rows do not lie together.
        kind = type(placement).__name__
        if kind != "Replicate" and not (kind == "Shard" and placement.dim == 0):
            raise TypeError(
                f"parameter {name!r} is laid out as {placements}: a step is projected where each process has whole "
                "rows, Shard(dim=0), or all of it, Replicate(). Shard it so, or exclude it"
            )
    if find_local_rows(parameter) is not None and not by_fsdp:
        raise TypeError(
            f"parameter {name!r} is spread over processes, but fully_shard was called on no module of this model: call "
            "it on the one that the memory is of, or exclude what is spread otherwise, as by tensor parallelism"
        )
    if weight is not None and not has_same_layout(weight, parameter):
        raise TypeError(
            f"parameter {name!r} is laid out as {placements or 'a plain tensor'}, its layer's weight as "
            f"{_layout(weight)[1] or 'a plain tensor'}: shard both alike, exclude the bias, or take bias='freeze'"
        )


def has_same_layout(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether a tensor is spread over the same processes in the same way, or neither is over any."""
    return _layout(tensor) == _layout(parameter)


def _layout(parameter: Tensor) -> tuple[DeviceMesh | None, tuple[Any, ...]]:
    spread = as_dtensor(parameter)
    return (None, ()) if spread is None else (spread.device_mesh, tuple(spread.placements))


def find_fsdp_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that ``fully_shard`` was called on."""
    module = sys.modules.get("torch.distributed.fsdp")
    return [] if module is None else [unit for unit in model.modules() if isinstance(unit, module.FSDPModule)]


def reshard(units: Iterable[nn.Module]) -> None:
    """Put the shards back in place of what a forward pass has gathered; the outermost unit keeps that otherwise."""
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
    """A block and its subspace cut to what one process has.

    Args:
        block: of the whole weight.
        space: for all of its inputs.
        weight: shape of the whole weight.
        rows: of the weight that the process has.
        bias: shape of the whole bias, if one goes with the weight.
        bias_rows: of the bias that the process has.
    """
    if isinstance(space, TokenSubspace):
        return block, space.select_tokens(rows.start, rows.stop)
    assert isinstance(space, Subspace)
    if block.input_dim == 0:
        outputs = weight[1:].numel()
        own_bias = None if bias_rows is None else bias_rows.intersect(0, outputs)
        return block, ScatteredSubspace(space, rows, outputs, slice(0, outputs), slice(rows.start, rows.stop), own_bias)
    first, last, _ = slice(*block.rows).indices(weight[0])
    mine = rows.intersect(first, last)
    cut = replace(block, rows=rows.shift(first, mine), bias_rows=None)
    if bias is not None and bias_rows is not None:
        bias_first, bias_last, _ = slice(*(block.bias_rows or block.rows)).indices(bias[0])
        own_bias = bias_rows.intersect(bias_first, bias_last)
        cut = replace(cut, bias_rows=bias_rows.shift(bias_first, own_bias))
        if (weight[0], first) != (bias[0], bias_first):
            return cut, ScatteredSubspace(space, rows, last - first, mine, slice(0, weight[1:].numel()), own_bias)
    if block.groups == 1:
        return cut, space
    size = (last - first) // block.groups
    groups = slice(mine.start // size, max(-(-mine.stop // size), mine.start // size + 1))
    before, after = mine.start - groups.start * size, groups.stop * size - mine.stop
    cut = replace(cut, groups=groups.stop - groups.start)
    if before or after:
        cut = _CutGroups(**vars(cut), before=before, after=after)
    return cut, space.select_groups(groups)


@dataclass(frozen=True)
class _CutGroups(Block):
    """LocalRows of a grouped block that need not begin and end with a group: what is elsewhere counts as no change.

    Attributes:
        before: how many rows of the first group are elsewhere.
        after: how many rows of the last one are.
    """

    before: int = 0
    after: int = 0

    def view_matrix(self, weight: Tensor) -> Tensor:
        part = weight[slice(*self.rows)].flatten(1)
        return F.pad(part, (0, 0, self.before, self.after)).reshape(self.groups, -1, part.shape[1])

    def view_bias(self, bias: Tensor) -> Tensor:
        return F.pad(bias[slice(*(self.bias_rows or self.rows))], (self.before, self.after)).reshape(self.groups, -1)

    def write_matrix(self, weight: Tensor, matrix: Tensor) -> None:
        super().write_matrix(weight, self._here(matrix.flatten(0, 1)))

    def write_bias(self, bias: Tensor, vector: Tensor) -> None:
        super().write_bias(bias, self._here(vector.flatten()))

    def _here(self, rows: Tensor) -> Tensor:
        return rows[self.before : len(rows) - self.after]


class ScatteredSubspace(Projector):
    """A subspace for a weight, or weight and bias, whose parts on several processes meet in one product.

    Each process puts what its own part does along the bases into a matrix of zeros; one sum over all of them is what
    the whole does.

    Args:
        space: the whole subspace.
        rows: of the weight that are here.
        outputs: how many there are on all processes.
        own_outputs: those that the weight has here.
        own_inputs: those that the weight has here.
        own_bias: outputs whose bias is here; None if it has none.
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
        self._constant = space.basis[:, -1:]  # what meets the bias, if there is one

    def subtract_projection_(
        self, source: Tensor, source_bias: Tensor | None, target: Tensor, target_bias: Tensor | None
    ) -> None:
        coefficients = self._along(source, source_bias)
        coefficients *= self.importance.unsqueeze(1)
        target.baddbmm_(coefficients[:, self._own_outputs], self._basis.mT, alpha=-1)
        if target_bias is not None:
            target_bias -= (coefficients[:, self._own_bias] * self._constant).sum(-1)

    def compute_blocked_share(self, matrix: Tensor, bias: Tensor | None = None) -> float:
        blocked = self._along(matrix, bias) * (self.importance == 1).unsqueeze(1)
        size = float(self._rows.sum_over_ranks(matrix.square().sum()).sqrt())
        return float(blocked.norm()) / max(size, torch.finfo(matrix.dtype).tiny)

    def _along(self, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """What weight and bias of all processes do along each basis. [1, outputs, k]"""
        found = matrix.new_zeros(1, self._outputs, self._basis.shape[2])
        found[:, self._own_outputs] = compute_coefficients(self._basis, matrix, None)
        if bias is not None:
            found[:, self._own_bias] += bias.unsqueeze(-1) * self._constant
        return self._rows.sum_over_ranks(found)
