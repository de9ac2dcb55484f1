"""Updates over several processes: each reads its own shard of the data, and all end with the same memory.

The processes first exchange failures and numbers of rows, so that either all raise or all continue in the same way.
Each Gram matrix is then summed and decomposed on one process, and the bases are broadcast, so they are equal to the
bit.
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
    # PyTorch imports this with the first optimizer, and the default arguments of its functions are the process group of
    # that moment. If one were set up by then, destroy_process_group could not end its threads, which may abort the
    # process if they outlive the interpreter.
    import torch.distributed.nn.functional  # noqa: F401

R = TypeVar("R")
V = TypeVar("V")


@dataclass(frozen=True)
class _LocalGram:
    """Description of a layer's Gram matrix on one process; layers with equal numbers share it there."""

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
    """The processes that train one model, or this one alone.

    Args:
        distributed: Whether other processes take part, if torch.distributed has been set up.
    """

    def __init__(self, distributed: bool = True) -> None:
        together = distributed and dist.is_available() and dist.is_initialized()
        self.size: int = dist.get_world_size() if together else 1
        self.rank: int = dist.get_rank() if together else 0

    def split_samples(self, samples: int | None, batches: Iterable[Any]) -> int | None:
        """Return this process's share of a number of samples.

        Args:
            samples: Number of samples of all processes; None for all that there are.
            batches: Batches of this process. Samples that their loader repeats are left out.

        Returns:
            Number of samples of this process; None for all of its batches.
        """
        if self.size == 1:
            return samples
        own = None if samples is None else samples // self.size + (self.rank < samples % self.size)
        distinct = _count_distinct(batches)
        return min((number for number in (own, distinct) if number is not None), default=None)

    def run_together(self, work: Callable[[], R]) -> R:
        """Run a function that all processes call, and raise in all of them if it fails in one.

        Args:
            work: Function without arguments.

        Returns:
            The function's result.

        Raises:
            RuntimeError: It has failed in another process.
        """
        if self.size == 1:
            return work()
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        messages = self._gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, message in enumerate(messages):
            if message is not None:
                raise RuntimeError(f"rank {rank} failed, so the memory has not changed: {message}")
        return result

    def run_in_lockstep(self, batches: Iterator[Any], run: Callable[[Any], Any]) -> None:
        """Run batches through a sharded model, whose forward passes all processes must run together.

        A process that has no batch left runs its last one again while others have more. If one process fails between
        two passes, all stop; :meth:`run_together` then raises in all of them.

        Args:
            batches: Batches of this process.
            run: Function that runs one batch.
        """
        batch: Any = None
        has_more = True
        failure: Exception | None = None
        while True:
            try:
                batch = next(batches) if has_more else batch
            except StopIteration:
                has_more = False
            except Exception as error:
                failure = error
            states = self._gather_objects((has_more, failure is not None))
            if failure is not None:
                raise failure
            if any(failed for _, failed in states) or not any(more for more, _ in states):
                return
            try:
                run(batch)
            except Exception as error:
                has_more, failure = False, error

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all processes."""
        return tensor if self.size == 1 else self._broadcast(self._reduce(tensor, 0), 0)

    def broadcast_first(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the first process."""
        return tensor if self.size == 1 else self._broadcast(tensor, 0)

    def merge_grams(self, grams: Mapping[str, InputGram]) -> tuple[dict[str, InputGram], set[str]]:
        """Sum Gram matrices over all processes, each on one of them.

        Args:
            grams: Gram matrices of this process by layer.

        Returns:
            The sums that this process has, by layer; and the names of the layers that have one on any process.
        """
        if self.size == 1:
            return dict(grams), set(grams)
        numbers = {id(gram): index for index, gram in enumerate({id(gram): gram for gram in grams.values()}.values())}
        described = self._gather_objects({name: _describe(gram, numbers) for name, gram in grams.items()})
        names = list(dict.fromkeys(name for grams_of_rank in described for name in grams_of_rank))
        # Layers share a sum if they share a Gram matrix on every process.
        sharing: dict[tuple[int | None, ...], list[str]] = {}
        for name in names:
            key = tuple(of_rank[name].number if name in of_rank else None for of_rank in described)
            sharing.setdefault(key, []).append(name)
        merged: dict[str, InputGram] = {}
        for number, members in enumerate(sharing.values()):
            parts = [of_rank[members[0]] for of_rank in described if members[0] in of_rank]
            ranks = [rank for rank, of_rank in enumerate(described) if members[0] in of_rank]
            owner = ranks[number % len(ranks)]
            total = self._sum_grams(grams.get(members[0]), parts, owner)
            if self.rank == owner:
                merged |= dict.fromkeys(members, total)
        return merged, set(names)

    def gather_lists(self, own: list[V]) -> list[V]:
        """Return the lists of all processes, one after another."""
        return own if self.size == 1 else [item for each in self._gather_objects(own) for item in each]

    def broadcast_object(self, value: V) -> V:
        """Return the value of the first process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def broadcast_bases(self, own: Mapping[str, Bases]) -> dict[str, Bases]:
        """Return the bases that any process has computed.

        Args:
            own: Bases that this process has computed, by layer.

        Returns:
            Bases of all processes by layer.
        """
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

    def _sum_grams(self, own: InputGram | None, parts: list[_LocalGram], owner: int) -> InputGram:
        """Return the sum of a Gram matrix over all processes, which is complete on its owner only."""
        shape = parts[0]
        count = sum(part.count for part in parts)
        if shape.is_tokens:
            tokens = own if isinstance(own, TokenCounts) else TokenCounts(shape.inputs)
            return TokenCounts.from_counts(self._reduce(tokens.counts, owner), count)
        rows = None if own is None else own.get_rows()
        if count < shape.inputs + shape.constant and not any(part.is_folded for part in parts):
            whole = InputGram(shape.groups, shape.inputs, constant=shape.constant, precise=True)
            whole.add(self._gather_rows(rows, shape, max(part.count for part in parts)))
            return whole
        if shape.is_wide:
            wide = own if isinstance(own, WideGram) else WideGram.make_zero(shape.inputs, shape.constant, shape.sketch)
            return wide.reduce(lambda tensor: self._reduce(tensor, owner), count)
        if own is None:
            d = shape.inputs + shape.constant
            gram = torch.zeros(shape.groups, d, d, dtype=torch.float64, device="cpu")
        else:
            gram = own.get_gram() if rows is None else rows.mT @ rows
        return InputGram.from_gram(self._reduce(gram, owner), count, shape.inputs, constant=shape.constant)

    def _gather_rows(self, rows: Tensor | None, shape: _LocalGram, most: int) -> Tensor:
        """Return the rows of all processes, [groups, n, inputs], of which each has at most ``most``."""
        count = 0 if rows is None else rows.shape[1]
        padded = torch.zeros(shape.groups, most + 1, shape.inputs, dtype=torch.float64, device="cpu")
        if rows is not None:
            padded[:, :count] = rows[..., : shape.inputs]
        padded[:, most] = count
        sent = self._move_to_backend(padded)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent)
        return torch.cat([part[:, : int(part[0, most, 0])] for part in received], dim=1)

    def _gather_objects(self, value: Any) -> list[Any]:
        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, value)
        return box

    def _reduce(self, tensor: Tensor, owner: int) -> Tensor:
        sent = self._move_to_backend(tensor).clone()
        dist.reduce(sent, dst=owner)
        return sent.to(tensor.device)

    def _broadcast(self, tensor: Tensor, owner: int) -> Tensor:
        sent = self._move_to_backend(tensor)
        dist.broadcast(sent, src=owner)
        return sent.to(tensor.device)

    def _move_to_backend(self, tensor: Tensor) -> Tensor:
        """Return a tensor on a device that the process group's backend can communicate from."""
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
        return tensor.to(device).contiguous()


def _count_distinct(batches: Iterable[Any]) -> int | None:
    """Return the number of samples of this process that its loader does not repeat; None if it repeats none.

    Loaders deal blocks of samples to the processes in turn. If the last round is incomplete, they fill it up with
    samples of the first one.
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


def _describe(gram: InputGram, numbers: Mapping[int, int]) -> _LocalGram:
    return _LocalGram(
        number=numbers[id(gram)],
        count=gram.count,
        is_folded=gram.is_folded,
        is_tokens=isinstance(gram, TokenCounts),
        groups=gram.groups,
        inputs=gram.inputs,
        constant=gram.constant,
        is_wide=isinstance(gram, WideGram),
        sketch=gram.sketch_shape if isinstance(gram, WideGram) else None,
    )
