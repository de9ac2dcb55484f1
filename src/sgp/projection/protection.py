"""What of a model is protected at this moment: its layout, its subspaces, and who steps its weights."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sgp.projection.input_side import InputSide
from sgp.projection.layer_types import Block
from sgp.projection.layout import Guard, Layout, check_layouts
from sgp.projection.norm_stats import FrozenNormStatistics
from sgp.projection.sharded import LocalRows, cut_to_shard, find_fsdp_modules, find_local_rows, get_local, reshard
from sgp.projection.subspace import Bases, Blocking, Subspace

if TYPE_CHECKING:
    from sgp.projection.optim import Handle


# Multiply-adds of a projection below which the bookkeeping of the input side costs more than it saves.
WORTH_WATCHING = 10_000_000


class Protection:
    """Shared by a memory and the handles of its optimizers.

    Attributes:
        tasks: how many tasks the subspaces hold.
        layout: how the model's parameters are sorted, as of the last update.
        subspaces: by guard.
        sides: linear layers whose inputs are watched, by guard.
        trained: parameters that an attached optimizer has stepped since the last update.
        fingerprints: of the guarded parameters, as of the last update.
        proved: how the trial of a layer's input side has ended since the last update, so that a run that is
            taken up again takes the same road.
        unfinished: handles with a change that is still to be projected, oldest first. They are kept alive until it is,
            though their optimizer may be gone.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.model = model
        self.tasks = 0
        self.layout = layout
        self.subspaces: dict[str, Bases] = {}
        self.sides: dict[str, InputSide] = {}
        self.trained: set[str] = set()
        self.fingerprints: dict[str, str] = {}
        self.proved: dict[str, bool] = {}
        self.unfinished: dict[Handle, None] = {}
        myself = weakref.ref(self)  # a plain reference would be a cycle that keeps the model alive
        self.statistics = FrozenNormStatistics(lambda: (alive := myself()) is not None and alive.is_attached)
        self._handles: list[weakref.ref[Handle]] = []
        self._side_owner: dict[str, object] = {}
        self._ready: dict[str, tuple[Bases, Bases]] = {}
        self._parts: dict[str, tuple[tuple[Bases, LocalRows, LocalRows | None], tuple[Block, Blocking]]] = {}
        self._owners: dict[str, nn.Module] = {}
        self._units: list[nn.Module] = []

    def store(self, tasks: int, layout: Layout, subspaces: Mapping[str, Bases]) -> None:
        """Make new subspaces the ones in force, all at once."""
        self.tasks, self.layout, self.subspaces = tasks, layout, dict(subspaces)
        self._ready.clear()
        self._parts.clear()
        self._owners.clear()
        for name in {*layout.frozen, *(name for guard in layout.guards.values() for name in guard.parameters)}:
            self.parameter(name)  # remembered, should its module be wrapped later
        frozen = layout.statistics if tasks else []
        self.statistics.freeze({name: self.model.get_submodule(name) for name in frozen})
        self.proved.clear()
        for name in list(self.sides):
            self.sides.pop(name).close("the memory was updated")

    def active(self) -> Iterator[Guard]:
        """Guards that have bases."""
        for name, subspace in self.subspaces.items():
            if not subspace.is_empty and name in self.layout.guards:
                yield self.layout.guards[name]

    def parameter(self, name: str) -> nn.Parameter:
        """A live parameter by name."""
        parameter = self.find(name)
        if parameter is None:
            raise RuntimeError(f"parameter {name!r} is gone from the model since the last update")
        return parameter

    def get_local(self, name: str) -> Tensor:
        """What this process has of a parameter: its own memory, without history."""
        return get_local(self.parameter(name))

    @property
    def is_sharded(self) -> bool:
        """Whether the model is spread over processes, so that they must run its forward passes together."""
        return bool(self._units)

    def look_for_shards(self) -> None:
        """Take note of what the model is spread over, and put every shard in its place.

        Raises:
            TypeError: a parameter is laid out in a way that steps cannot deal with.
        """
        self._units = find_fsdp_modules(self.model)
        self.reshard()
        check_layouts(self.layout, self.find, by_fsdp=self.is_sharded)

    def reshard(self) -> None:
        """The parameters of the model are those that optimizers hold again, whatever ran before."""
        reshard(self._units)

    def find(self, name: str) -> nn.Parameter | None:
        """A live parameter by name, or None; a user may have replaced it, or its module, since the last step.

        A module that has been wrapped since (compiled, put into a container) is not under its name any more, but is
        still the one that computes.
        """
        path, _, leaf = name.rpartition(".")
        module: nn.Module | None = self.model
        for part in path.split(".") if path else ():
            module = module._modules.get(part) if module is not None else None
        if module is None or module._parameters.get(leaf) is None:
            module = self._owners.get(name)
        else:
            self._owners[name] = module
        return None if module is None else module._parameters.get(leaf)

    def renamed(self, layout: Layout) -> dict[str, str]:
        """Old name -> new name of the guards whose weight is now found elsewhere in the model."""
        places = {(id(self.model.get_parameter(g.weight)), g.block): name for name, g in layout.guards.items()}
        found = {}
        for guard in self.active():
            if guard.name not in layout.guards:
                place = places.get((id(self.parameter(guard.weight)), guard.block))
                if place is not None:
                    found[guard.name] = place
        return found

    def tensors(self, guard: Guard) -> tuple[nn.Parameter, nn.Parameter | None]:
        """A guard's weight and the bias that is protected with it."""
        return self.parameter(guard.weight), None if guard.bias is None else self.parameter(guard.bias)

    def subspace_for(self, guard: Guard) -> Bases:
        """A guard's subspace on its weight's device, in the precision of its arithmetic."""
        weight, stored = self.parameter(guard.weight), self.subspaces[guard.name]
        dtype = weight.dtype if weight.dtype == torch.float64 else torch.float32
        if stored.is_compressed:  # a copy to keep would undo the saving
            return stored.to(weight.device, dtype)
        source, ready = self._ready.get(guard.name, (None, None))
        is_ready = ready is not None and (ready.importance.device, ready.importance.dtype) == (weight.device, dtype)
        if ready is None or source is not stored or not is_ready:
            ready = stored.to(weight.device, dtype)
            self._ready[guard.name] = (stored, ready)
        return ready

    def part(self, guard: Guard) -> tuple[Block, Blocking]:
        """What a step projects: a guard's block and subspace, cut to what this process has of its parameters."""
        weight, bias = self.tensors(guard)
        space, rows = self.subspace_for(guard), find_local_rows(weight)
        if rows is None:
            return guard.block, space
        shape, bias_rows = (None, None) if bias is None else (bias.shape, find_local_rows(bias))
        key = (space, rows, bias_rows)
        known, part = self._parts.get(guard.name, (None, None))
        if part is None or known is None or known[0] is not space or known[1:] != key[1:]:
            part = cut_to_shard(guard.block, space, weight.shape, rows, shape, bias_rows)
            if not self.subspaces[guard.name].is_compressed:
                self._parts[guard.name] = (key, part)
        return part

    def watch(self, guard: Guard, owner: object, *, always: bool) -> None:
        """Put a linear layer's input side on trial for an owner, if it can be watched and, unless always, may gain."""
        self.unwatch(guard, "")
        weight, bias = self.tensors(guard)
        gain = weight.numel() * self.subspaces[guard.name].width
        is_open = guard.layer_type.is_linear and len(guard.sources) == 1 and self.proved.get(guard.name, True)
        is_open = is_open and find_local_rows(weight) is None
        if is_open and (always or gain > WORTH_WATCHING):
            module = self._owners[guard.weight]  # under its name there may be a wrapper by now
            subspace = self.subspace_for(guard)
            assert isinstance(subspace, Subspace)  # of a linear layer
            side = InputSide(module, weight, bias, subspace)
            if guard.name in self.proved:
                side.mode = "replace"
            self.sides[guard.name] = side
            self._side_owner[guard.name] = owner

    def unwatch(self, guard: Guard, why: str) -> None:
        """Stop watching a layer's inputs."""
        side = self.sides.pop(guard.name, None)
        if side is not None:
            side.close(why)

    def release(self, owner: object) -> None:
        """Stop watching what an owner had put on trial."""
        for name in [name for name in self.sides if self._side_owner.get(name) is owner]:
            self.sides.pop(name).close("its optimizer is gone")

    def handles(self) -> Iterator[Handle]:
        """Attached handles, oldest first."""
        for reference in list(self._handles):
            handle = reference()
            if handle is None or not handle.attached:
                self._handles.remove(reference)
            else:
                yield handle

    @property
    def is_attached(self) -> bool:
        """Whether any optimizer is."""
        return any(True for _ in self.handles())

    def add(self, handle: Handle) -> None:
        """Remember a handle as long as its optimizer lives."""
        self._handles.append(weakref.ref(handle))

    def flush(self) -> None:
        """Project whatever is still to be projected."""
        for handle in list(self.unfinished):
            handle.flush()

    @contextmanager
    def unflushed(self) -> Iterator[None]:
        """Weights are loaded and put back inside: what is still to be projected stays so."""
        unfinished, self.unfinished = self.unfinished, {}
        try:
            yield
        finally:
            self.unfinished = unfinished

    def fingerprint(self, names: Iterable[str]) -> dict[str, str]:
        """Per parameter its type and a number that any change of its bits changes; the same on all processes."""
        found = {}
        for name in names:
            parameter = self.parameter(name)
            found[name] = f"{str(parameter.dtype).removeprefix('torch.')} {_fingerprint(parameter, parameter.dtype)}"
        return found

    def has_changed(self, name: str) -> bool:
        """Whether a parameter's values are others than at the last update. A change of type alone is none."""
        parameter, then = self.find(name), self.fingerprints.get(name)
        if parameter is None or then is None:
            return False
        name_of_type, number = then.split()
        dtype: torch.dtype = getattr(torch, name_of_type)
        if torch.promote_types(dtype, parameter.dtype) != parameter.dtype:
            return False  # it was rounded since; what else happened cannot be told
        return _fingerprint(parameter, dtype) != _wrapped(int(number))


def _fingerprint(parameter: Tensor, dtype: torch.dtype) -> int:
    """Bits summed as integers, weighted by position: exact, whatever the order of summation and whoever has them."""
    tensor, rows = get_local(parameter).to(dtype), find_local_rows(parameter)
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = 0
    start = 1 if rows is None else 1 + rows.start * parameter.shape[1:].numel()
    for bits in torch.split(tensor.contiguous().view(width).flatten(), 2**20):
        position = torch.arange(start, start + bits.numel(), device=bits.device)
        total += int((bits.to(torch.int64) * position).sum())
        start += bits.numel()
    total = _wrapped(total)
    return total if rows is None else int(rows.sum_over_ranks(torch.tensor(total)))


def _wrapped(number: int) -> int:
    """As 64 bits hold it: the sum of pieces does not depend on where a tensor was cut."""
    return (number + 2**63) % 2**64 - 2**63
