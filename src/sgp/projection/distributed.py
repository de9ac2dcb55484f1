"""An update over several processes: each streams its own shard of the data, and all end with the same memory.

The processes first tell each other who has failed and how many rows each has seen, so that all raise or all go one way.
Each statistic is then summed on one process and decomposed there, and the bases are sent to all: bits cannot differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from sgp.projection.batches import find_sampler
from sgp.projection.gram import InputGram
from sgp.projection.sketch import WideGram
from sgp.projection.subspace import Bases
from sgp.projection.tokens import TokenCounts, load_bases

if dist.is_available():
    # Torch imports this by itself with the first optimizer, and the defaults of its functions are the group of all
    # processes as it is at that moment. Were one set up by then, no destroy_process_group would end its threads, and
    # they may abort the process when they outlive the interpreter.
    import torch.distributed.nn.functional

R = TypeVar("R")
V = TypeVar("V")


@dataclass(frozen=True)
class _Seen:
    """What one process has of a guard's statistic; guards of the same number share it there."""

    number: int
    count: int
    is_folded: bool
    is_tokens: bool
    groups: int
    inputs: int
    constant: bool
    is_wide: bool
    sketch: tuple[int, int] | None  # numbers of bases and of test directions


class ProcessGroup:
    """The processes that learn together, or this one alone.

    Args:
        distributed: whether there are others, if torch.distributed has been set up.
    """

    def __init__(self, distributed: bool = True) -> None:
        together = distributed and dist.is_available() and dist.is_initialized()
        self.size: int = dist.get_world_size() if together else 1
        self.rank: int = dist.get_rank() if together else 0

    def split_samples(self, samples: int | None, batches: Iterable[Any]) -> int | None:
        """How many samples this process takes of a number for all; None is all that it has, repeated ones left out."""
        if self.size == 1:
            return samples
        own = None if samples is None else samples // self.size + (self.rank < samples % self.size)
        distinct = _distinct(batches)
        if distinct is None:
            return own
        return distinct if own is None else min(own, distinct)

    def run_together(self, work: Callable[[], R]) -> R:
        """The result of some work that all processes do; if it fails in one, all raise."""
        if self.size == 1:
            return work()
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        said = self._gathered(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, message in enumerate(said):
            if message is not None:
                raise RuntimeError(f"process {rank} failed, and the memory is as it was: {message}")
        return result

    def run_in_lockstep(self, batches: Iterator[Any], run: Callable[[Any], Any]) -> None:
        """Run batches through a model whose forward passes are of all processes together, as where it is sharded.

        A process that has come to its end runs its last batch again while others have one. If one has failed between
        two passes, all stop here; :meth:`run_together` then tells them why.
        """
        batch: Any = None
        goes_on = True
        failure: Exception | None = None
        while True:
            try:
                batch = next(batches) if goes_on else batch
            except StopIteration:
                goes_on = False
            except Exception as error:
                failure = error
            said = self._gathered((goes_on, failure is not None))
            if failure is not None:
                raise failure
            if any(failed for _, failed in said) or not any(more for more, _ in said):
                return
            try:
                run(batch)
            except Exception as error:
                goes_on, failure = False, error

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Over all processes."""
        return tensor if self.size == 1 else self._broadcast(self._reduced(tensor, 0), 0)

    def broadcast_first(self, tensor: Tensor) -> Tensor:
        """What the first process has, on all."""
        return tensor if self.size == 1 else self._broadcast(tensor, 0)

    def merge_grams(self, statistics: Mapping[str, InputGram]) -> tuple[dict[str, InputGram], set[str]]:
        """Statistics over all processes, each on one of them; and all guards that have one somewhere."""
        if self.size == 1:
            return dict(statistics), set(statistics)
        numbers = {id(s): index for index, s in enumerate({id(s): s for s in statistics.values()}.values())}
        seen = self._gathered({name: _seen(statistic, numbers) for name, statistic in statistics.items()})
        names = list(dict.fromkeys(name for each in seen for name in each))
        # Guards share if they do so on every process.
        together: dict[tuple[int | None, ...], list[str]] = {}
        for name in names:
            key = tuple(each[name].number if name in each else None for each in seen)
            together.setdefault(key, []).append(name)
        merged: dict[str, InputGram] = {}
        for number, members in enumerate(together.values()):
            parts = [each.get(members[0]) for each in seen]
            having = [rank for rank, part in enumerate(parts) if part is not None]
            owner = having[number % len(having)]
            total = self._sum(statistics.get(members[0]), [part for part in parts if part is not None], owner)
            if self.rank == owner:
                merged |= dict.fromkeys(members, total)
        return merged, set(names)

    def gather_lists(self, own: list[V]) -> list[V]:
        """Return the lists of all processes, one after another."""
        return own if self.size == 1 else [item for each in self._gathered(own) for item in each]

    def broadcast_object(self, value: V) -> V:
        """Return what the first process has, on all."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def broadcast_bases(self, own: Mapping[str, Bases]) -> dict[str, Bases]:
        """Bases that this process has computed, and those of all others."""
        if self.size == 1:
            return dict(own)
        everything: dict[str, Bases] = {}
        for owner in range(self.size):
            spaces = {id(space): space for space in own.values()} if self.rank == owner else {}
            states = [space.state_dict() for space in spaces.values()]
            layers = [[name for name, space in own.items() if id(space) == key] for key in spaces]
            shapes = [{key: (t.shape, t.dtype) for key, t in state.items()} for state in states]
            box: list[Any] = [list(zip(layers, shapes, strict=True))]
            dist.broadcast_object_list(box, src=owner)
            for index, (members, described) in enumerate(box[0]):
                state = {}
                for key, (shape, dtype) in described.items():
                    sent = states[index][key] if self.rank == owner else torch.empty(shape, dtype=dtype, device="cpu")
                    state[key] = self._broadcast(sent, owner)
                everything |= dict.fromkeys(members, load_bases(state))
        return everything

    def _sum(self, mine: InputGram | None, parts: list[_Seen], owner: int) -> InputGram:
        """One statistic over all processes; whole on its owner only."""
        shape = parts[0]
        count = sum(part.count for part in parts)
        if shape.is_tokens:
            own = mine if isinstance(mine, TokenCounts) else TokenCounts(shape.inputs)
            return TokenCounts.from_counts(self._reduced(own.counts, owner), count)
        d = shape.inputs + shape.constant
        if count < d and not any(part.is_folded for part in parts):
            most = max(part.count for part in parts)
            padded = torch.zeros(shape.groups, most + 1, d, dtype=torch.float64, device="cpu")
            if mine is not None and mine.count:
                rows = mine.get_rows()
                assert rows is not None
                padded[:, : rows.shape[1]] = rows
            own_count = 0 if mine is None else mine.count
            padded[:, most] = own_count  # how many of the rows are any
            sent = self._here(padded)
            received = [torch.empty_like(sent) for _ in range(self.size)]
            dist.all_gather(received, sent)
            rows = torch.cat([part[:, : int(part[0, most, 0])] for part in received], dim=1)
            whole = InputGram(shape.groups, shape.inputs, constant=shape.constant, precise=True)
            whole.add(rows[..., : shape.inputs])
            return whole
        if shape.is_wide:
            wide = (
                mine if isinstance(mine, WideGram) else WideGram.make_zero(shape.inputs, shape.constant, shape.sketch)
            )
            return wide.reduce(lambda tensor: self._reduced(tensor, owner), count)
        gram = torch.zeros(shape.groups, d, d, dtype=torch.float64, device="cpu")
        if mine is not None:
            rows = mine.get_rows()
            gram = mine.get_gram() if rows is None else rows.mT @ rows
        return InputGram.from_gram(self._reduced(gram, owner), count, shape.inputs, constant=shape.constant)

    def _gathered(self, value: Any) -> list[Any]:
        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, value)
        return box

    def _reduced(self, tensor: Tensor, owner: int) -> Tensor:
        sent = self._here(tensor).clone()
        dist.reduce(sent, dst=owner)
        return sent.to(tensor.device)

    def _broadcast(self, tensor: Tensor, owner: int) -> Tensor:
        sent = self._here(tensor)
        dist.broadcast(sent, src=owner)
        return sent.to(tensor.device)

    def _here(self, tensor: Tensor) -> Tensor:
        """Where the processes can exchange it."""
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
        return tensor.to(device).contiguous()


def _distinct(batches: Iterable[Any]) -> int | None:
    """How many samples of its own a process has of a loader that fills the last round up with others; None otherwise.

    Processes are dealt blocks in turn. What the last round lacks comes from the first one, and for those that come last
    in it.
    """
    sampler, shard = find_sampler(batches), getattr(batches, "batch_sampler", None)
    accelerate = sys.modules.get("accelerate.data_loader")
    if isinstance(sampler, DistributedSampler) and not sampler.drop_last:
        whole, block = len(sampler.dataset), 1  # type: ignore[arg-type]
        rank, size = sampler.rank, sampler.num_replicas
    elif accelerate is not None and isinstance(shard, accelerate.BatchSamplerShard):
        is_filled = shard.even_batches and not shard.drop_last and shard.batch_size is not None
        if not is_filled or not isinstance(sampler, Sized):
            return None
        rank, size = shard.process_index, shard.num_processes
        whole, block = len(sampler), shard.batch_size // (size if shard.split_batches else 1)
    else:
        return None
    rounds, rest = divmod(whole, size * block)
    return rounds * block + min(max(rest - rank * block, 0), block)


def _seen(statistic: InputGram, numbers: Mapping[int, int]) -> _Seen:
    return _Seen(
        numbers[id(statistic)],
        statistic.count,
        statistic.is_folded,
        isinstance(statistic, TokenCounts),
        statistic.groups,
        statistic.inputs,
        statistic.constant,
        isinstance(statistic, WideGram),
        statistic.sketch_shape if isinstance(statistic, WideGram) else None,
    )
