"""Protected layers: a block of a weight, its bias, and the subspace that the layer's inputs span."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from sgp.projection.layer_types import Block, LayerType
from sgp.projection.sharded import cut_to_shard, find_local_rows, gather_shards, get_local
from sgp.projection.subspace import Bases
from sgp.projection.tokens import load_bases

HALF_PRECISION = (torch.float16, torch.bfloat16)
# A weight and its bias, or tensors of their shapes.
WeightAndBias = tuple[Tensor, Tensor | None]
# A fingerprint is summed over chunks of this many elements.
FINGERPRINT_CHUNK = 2**20


class PendingChange(Protocol):
    """A change that the optimizer has applied and that is still to be projected."""

    def flush(self) -> None:
        """Project the change now."""


@dataclass(eq=False, repr=False)
class ProtectedParameter:
    """A parameter of the model as the memory sees it; several layers may share one.

    The parameter is found through the module that owns it, since a user may replace it at any time
    (``load_state_dict(assign=True)``), and wrap the module (``torch.compile``).

    Attributes:
        name: Qualified name in the model.
        owner: Module that holds the parameter.
        leaf: Name of the parameter inside its owner.
        is_stepped: Whether an attached optimizer has stepped the parameter since the last update.
        fingerprint: Digest of the values at the last update; None before it.
        kept: Values before the steps that are still to be projected; the buffer is reused.
        master: Float32 copy of a 16-bit parameter, so that the rounding of a step does not leak.
        pending: Change that is still to be projected; None if there is none.
    """

    name: str
    owner: nn.Module
    leaf: str
    is_stepped: bool = False
    fingerprint: str | None = None
    kept: Tensor | None = None
    master: Tensor | None = None
    pending: PendingChange | None = None

    def __repr__(self) -> str:
        return f"ProtectedParameter({self.name!r})"

    @property
    def is_present(self) -> bool:
        """Whether the owner still has the parameter."""
        return self.owner._parameters.get(self.leaf) is not None

    @property
    def tensor(self) -> nn.Parameter:
        """The parameter as the model has it now.

        Raises:
            RuntimeError: The module has no such parameter any more.
        """
        parameter = self.owner._parameters.get(self.leaf)
        if parameter is None:
            raise RuntimeError(
                f"parameter {self.name!r} was removed from the model: restore it, or call memory.update with the model "
                "as it is now"
            )
        return parameter

    @property
    def local(self) -> Tensor:
        """The part of the parameter that this process holds."""
        return get_local(self.tensor)

    def bind(self, model: nn.Module) -> None:
        """Set the owner to the module that now has the parameter's name, if it has such a parameter.

        The owner of a parameter that was renamed, as by a wrapper around its module, stays as it is.
        """
        module: nn.Module | None = model
        for part in self.name.split(".")[:-1]:
            module = module._modules.get(part) if module is not None else None
        if module is not None and module._parameters.get(self.leaf) is not None:
            self.owner = module

    def keep(self) -> None:
        """Copy the values before a step into the buffer, and refresh the float32 master of a 16-bit parameter."""
        tensor, kept = self.local, self.kept
        if kept is None or (kept.shape, kept.dtype, kept.device) != (tensor.shape, tensor.dtype, tensor.device):
            kept = self.kept = torch.empty_like(tensor)
        kept.copy_(tensor)
        if tensor.dtype not in HALF_PRECISION:
            self.master = None
        elif self.master is None or self.master.shape != tensor.shape or self.master.device != tensor.device:
            self.master = tensor.float()
        else:
            # Where the weight was modified since the last step, the master follows it.
            self.master = torch.where(self.master.to(tensor.dtype) == tensor, self.master, tensor.float())

    def adapt_kept(self) -> None:
        """Move the buffers to the parameter's device and type, and append the rows that it has gained since.

        No step has changed these rows.
        """
        tensor, kept = self.local, self.kept
        if kept is None:
            return
        kept = self.kept = kept.to(tensor.device, tensor.dtype)
        self.master = None if self.master is None else self.master.to(tensor.device)
        if find_local_rows(self.tensor) is not None or len(kept) >= len(tensor):
            return
        self.kept = torch.cat([kept, tensor[len(kept) :]])
        if self.master is not None:
            self.master = torch.cat([self.master, tensor[len(kept) :].float()])

    def compute_change(self) -> Tensor:
        """Return the change since the values were kept, which replaces them in the buffer."""
        assert self.kept is not None
        if self.master is None:
            return torch.sub(self.local, self.kept, out=self.kept)
        change = self.local.float() - self.kept.float()
        self.master += change
        return change

    @property
    def target(self) -> Tensor:
        """The tensor that a projection changes: the master of a 16-bit parameter, or the parameter itself."""
        return self.local if self.master is None else self.master

    def compute_fingerprint(self) -> str:
        """Return the type and a checksum of the values, which are the same on all processes."""
        parameter = self.tensor
        return f"{str(parameter.dtype).removeprefix('torch.')} {_sum_bits(parameter, parameter.dtype)}"

    def has_changed(self) -> bool:
        """Return whether the values differ from those at the last update. A change of type alone does not count."""
        if self.fingerprint is None or not self.is_present:
            return False
        parameter = self.tensor
        name_of_type, number = self.fingerprint.split()
        dtype: torch.dtype = getattr(torch, name_of_type)
        if torch.promote_types(dtype, parameter.dtype) != parameter.dtype:
            return False  # it was rounded since, so any other change cannot be detected
        return _sum_bits(parameter, dtype) != _wrap_to_64_bits(int(number))


@dataclass(frozen=True)
class Source:
    """A place where a layer's input is collected.

    Attributes:
        module: Qualified name of the module.
        input: Name of the input among the module's inputs.
    """

    module: str
    input: str


@dataclass(eq=False, repr=False)
class ProtectedLayer:
    """One block of a weight with its bias and its subspace.

    ``nn.MultiheadAttention`` has four blocks; a grouped convolution has one, with a stack of bases.

    Attributes:
        name: Name of the module, followed by a colon and the input's name where a module has several blocks.
        block: Slice of the parameter.
        layer_type: Layer type of the module.
        weight: Parameter that has the block.
        bias: Parameter that is protected together with the weight; None if there is none or it is frozen.
        sources: Places where the input is collected; several if the weight is tied between modules.
        is_two_sided: Whether the weight is also protected from its other side, as where an embedding is tied to the
            output layer.
        subspace: Bases and importances; None before an update has reached the layer. Layers that read the same input
            share one.
        is_input_proven: Result of the trial of the input mode since the last update; None before it.
    """

    name: str
    block: Block
    layer_type: LayerType
    weight: ProtectedParameter
    bias: ProtectedParameter | None
    sources: list[Source]
    is_two_sided: bool = False
    subspace: Bases | None = None
    is_input_proven: bool | None = None
    _projector: tuple[Bases, tuple[object, ...], tuple[Block, Bases] | None] | None = None

    def __repr__(self) -> str:
        return f"ProtectedLayer({self.name!r})"

    @property
    def parameters(self) -> list[ProtectedParameter]:
        """The weight, and the bias if it is protected."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def has_bases(self) -> bool:
        """Whether the subspace has any bases."""
        return self.subspace is not None and not self.subspace.is_empty

    @property
    def has_sparse_gradient(self) -> bool:
        """Whether the weight's gradient is a sparse tensor."""
        gradient = self.weight.tensor.grad
        return gradient is not None and gradient.is_sparse

    @property
    def groups(self) -> int:
        """Number of independent matrices, each with its own bases."""
        return self.block.groups

    @property
    def dimension(self) -> int:
        """Input dimension, the constant input of a protected bias included."""
        return self.block.count_inputs(self.weight.tensor) + (self.bias is not None)

    def get_bases(self) -> Bases:
        """Return the subspace in the precision of a step, on the weight's device."""
        assert self.subspace is not None
        weight = self.weight.tensor
        return self.subspace.to(weight.device, torch.float64 if weight.dtype == torch.float64 else torch.float32)

    def get_projector(self) -> tuple[Block, Bases] | None:
        """Return the block and the subspace within this process's shards; None if a projection needs other shards."""
        weight, bias = self.weight.tensor, None if self.bias is None else self.bias.tensor
        rows = find_local_rows(weight)
        key = (weight.device, weight.dtype, rows)
        cached = self._projector
        if cached is not None and cached[0] is self.subspace and cached[1] == key:
            return cached[2]
        bases = self.get_bases()
        projector: tuple[Block, Bases] | None = (self.block, bases)
        if rows is not None:
            projector = cut_to_shard(self.block, bases, weight.shape, rows, None if bias is None else bias.shape)
        assert self.subspace is not None
        # Bases that are stored in fewer bits are expanded at each use: a cached copy would undo the saving.
        self._projector = None if self.subspace.is_compressed else (self.subspace, key, projector)
        return projector

    def subtract_projection_(self, source: WeightAndBias, target: WeightAndBias) -> None:
        """Subtract the part of the source that the subspace blocks from the target, in place (Eq. 3).

        Args:
            source: Tensors in the shapes of the local weight and bias.
            target: Tensors of the same shapes; to project a gradient, the source itself.
        """
        projector = self.get_projector()
        if projector is not None:
            _subtract(*projector, source, target)
            return
        weight, bias = self._gather(source)
        blocked = torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias)
        _subtract(self.block, self.get_bases(), (weight, bias), blocked)
        for parameter, part, own in zip(self.parameters, blocked, target, strict=False):
            rows = find_local_rows(parameter.tensor)
            if part is not None and own is not None and rows is not None:
                own += part[rows.start : rows.stop]

    def _gather(self, local: WeightAndBias) -> WeightAndBias:
        """Return a whole change from its shards; every process must call this."""
        weight, bias = local
        whole_bias = None if bias is None or self.bias is None else gather_shards(bias, self.bias.tensor)
        return gather_shards(weight, self.weight.tensor), whole_bias

    def project_(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Project a gradient or another change in place (Eq. 3)."""
        change = (weight, bias)
        self.subtract_projection_(change, change)

    def project_whole_(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Project a change of the whole weight in place, also if this process has only a shard of the weight."""
        change = (weight, bias)
        _subtract(self.block, self.get_bases(), change, change)

    def compute_blocked_share(self, weight: Tensor, bias: Tensor | None = None) -> float:
        """Return the share of a change along bases of importance 1."""
        change, projector = (weight, bias), self.get_projector()
        if projector is None:
            change, projector = self._gather(change), (self.block, self.get_bases())
        block, bases = projector
        return bases.compute_blocked_share(*_view_block(block, change, bases.importance.dtype))


def place_subspaces(layers: Iterable[ProtectedLayer]) -> None:
    """Move the bases of layers to the devices of their weights; layers that share bases go on sharing them."""
    moved: dict[tuple[int, torch.device], Bases] = {}
    for layer in layers:
        subspace = layer.subspace
        if subspace is None or not layer.weight.is_present:
            continue
        device = layer.weight.tensor.device
        if subspace.importance.device != device:
            layer.subspace = moved.setdefault((id(subspace), device), _move_bases(subspace, device))


def _move_bases(subspace: Bases, device: torch.device) -> Bases:
    """Return bases on another device. Ranks and sizes stay on the CPU, so that reading them does not synchronize."""
    state = {
        name: tensor if name in ("rank", "size") else tensor.to(device)
        for name, tensor in subspace.state_dict().items()
    }
    return load_bases(state)


def iterate_parameters(layers: Iterable[ProtectedLayer]) -> Iterator[ProtectedParameter]:
    """Yield the parameters of layers, each once."""
    yield from dict.fromkeys(parameter for layer in layers for parameter in layer.parameters)


def _subtract(block: Block, bases: Bases, source: WeightAndBias, target: WeightAndBias) -> None:
    dtype = bases.importance.dtype
    source_matrix, source_bias = _view_block(block, source, dtype)
    matrix, bias = (source_matrix, source_bias) if target is source else _view_block(block, target, dtype)
    bases.subtract_projection_(source_matrix, source_bias, matrix, bias)
    if not _shares_memory(matrix, target[0]):
        block.write_matrix(target[0], matrix)
    if target[1] is not None and bias is not None and not _shares_memory(bias, target[1]):
        block.write_bias(target[1], bias)


def _view_block(block: Block, tensors: WeightAndBias, dtype: torch.dtype) -> WeightAndBias:
    """Return the blocks of a weight, [groups, out, inputs], and of its bias, [groups, out], in a type."""
    weight, bias = tensors
    return block.view_matrix(weight).to(dtype), None if bias is None else block.view_bias(bias).to(dtype)


def _shares_memory(view: Tensor, tensor: Tensor) -> bool:
    """Return whether a tensor that was derived from another one is a view of it."""
    return (view._base if view._is_view() else view) is (tensor._base if tensor._is_view() else tensor)


def _sum_bits(parameter: Tensor, dtype: torch.dtype) -> int:
    """Return the sum of a tensor's bits as integers, weighted by position: exact in any order and on any shards."""
    tensor, rows = get_local(parameter).to(dtype), find_local_rows(parameter)
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = 0
    start = 1 if rows is None else 1 + rows.start * parameter.shape[1:].numel()
    for bits in torch.split(tensor.contiguous().view(width).flatten(), FINGERPRINT_CHUNK):
        position = torch.arange(start, start + bits.numel(), device=bits.device)
        total += int((bits.to(torch.int64) * position).sum())
        start += bits.numel()
    total = _wrap_to_64_bits(total)
    return total if rows is None else int(rows.sum_over_ranks(torch.tensor(total, device="cpu")))


def _wrap_to_64_bits(number: int) -> int:
    """Return a number modulo 2^64 as a signed integer, so that a sum does not depend on how a tensor is sharded."""
    return (number + 2**63) % 2**64 - 2**63
