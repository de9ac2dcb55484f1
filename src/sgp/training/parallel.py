"""The processes that learn one run together, as torchrun starts them.

Every process has the same weights, the same order of examples and the same memory. Of each batch it takes its own part,
and before a step the gradients are summed, so that every process steps by the gradient of the whole batch: the run is
that of a single process, up to rounding and to what dropout draws. Only the first process writes and speaks.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from sgp.methods import METHODS
from sgp.runs.config import AnyConfig, Config
from sgp.runs.folder import RunError
from sgp.training.batch_norm import BatchNormOfAll

R = TypeVar("R")
# How long a process waits at its end for the first one to have said what there is to say.
PATIENCE = timedelta(seconds=10)


class TeamError(RunError):
    """Another process has failed or is gone."""


class Team:
    """The processes that learn together, or this one alone.

    Attributes:
        rank: of this process; 0 is the first.
        size: how many there are.
        share: of the running batch that is this process's, in [0, 1].
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.share = 1.0

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    @property
    def stream(self) -> tuple[int, ...]:
        """What random numbers are told apart by that must not be those of the other processes."""
        return (self.rank,) if self.rank else ()

    def part(self, rows: Tensor) -> Tensor:
        """The rows of a batch that this process takes.

        In a batch of fewer rows than there are processes some take its first one, with a share of 0: all have to
        go the same way through the network.
        """
        own = rows[self.rank :: self.size]
        self.share = len(own) / len(rows)
        return own if len(own) else rows[:1]

    def turns(self, items: Iterable[R]) -> Iterator[R]:
        """Those of some items that are this process's turn."""
        return islice(items, self.rank, None, self.size)

    def attach(self, optimizer: Optimizer) -> None:
        """Sum gradients before each step of an optimizer. Hooks that are registered later see the sum."""
        if self.size > 1:
            optimizer.register_step_pre_hook(lambda *_: self._sum_gradients(optimizer))

    def normalising(self, network: nn.Module) -> AbstractContextManager[object]:
        """BatchNorm divides by the statistics of whole batches meanwhile, if the network has any."""
        norms = any(isinstance(module, _BatchNorm) for module in network.modules())
        return BatchNormOfAll(self) if norms and self.size > 1 else nullcontext()

    @torch.no_grad()
    def _sum_gradients(self, optimizer: Optimizer) -> None:
        """Each process has the gradient of a mean over its own rows: weighted by shares they sum to that of all."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        # A parameter that no process has a gradient for must stay without: to an optimizer that is not the same as 0.
        found = torch.tensor([float(p.grad is not None) for p in parameters])
        pieces = [torch.zeros(p.numel(), dtype=p.dtype) if p.grad is None else p.grad.flatten() for p in parameters]
        whole = torch.cat([found, *pieces])
        whole[len(found) :] *= self.share
        self.sum_(whole)
        flags, *summed = torch.split(whole, [len(found), *map(len, pieces)])
        for parameter, has, gradient in zip(parameters, flags.tolist(), summed, strict=True):
            if has and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if has and parameter.grad is not None:
                parameter.grad.copy_(gradient.view(parameter.shape))

    def sum_(self, tensor: Tensor) -> Tensor:
        """A tensor summed over all processes, in place: to the same bits on each."""
        if self.size > 1:
            with _talking():
                dist.all_reduce(tensor)
        return tensor

    def sums(self, *numbers: float) -> tuple[float, ...]:
        """Numbers summed over all processes."""
        return tuple(self.sum_(torch.tensor(numbers, dtype=torch.float64)).tolist()) if self.size > 1 else numbers

    def from_first(self, work: Callable[[], R]) -> R:
        """What some work gives that the first process does for all; where it fails, all raise."""
        if self.size == 1:
            return work()
        failure: Exception | None = None
        box: list[Any] = [None, None]
        if self.is_first:
            try:
                box[0] = work()
            except Exception as error:
                failure, box[1] = error, str(error)
        with _talking():
            dist.broadcast_object_list(box, src=0)
        if failure is not None:
            raise failure
        if box[1] is not None:
            raise TeamError(box[1])
        result: R = box[0]
        return result

    def agreed(self, work: Callable[[], R]) -> R:
        """What some work gives that every process does; where it fails in one, all raise. Only the first may speak."""
        if self.size == 1:
            return work()
        failure: BaseException | None = None
        try:
            with nullcontext() if self.is_first else _silence():
                result = work()
        except (Exception, SystemExit) as error:
            failure = error
        said = self._gathered(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        for rank, message in enumerate(said):
            if message is not None:
                raise TeamError(f"process {rank} has failed: {message}")
        return result

    def refuse_differences(self, digests: dict[str, str]) -> None:
        """All processes must hold the same.

        Args:
            digests: of what this one holds, by name.

        Raises:
            RunError: in all processes, if they do not.
        """
        if self.size == 1:
            return
        everyone = self._gathered(digests)
        other = sorted(name for name, digest in everyone[0].items() if any(each[name] != digest for each in everyone))
        if other:
            raise RunError(
                f"the processes have come apart, they differ in {' and '.join(other)}: have they the same versions of "
                "everything, on machines of one kind?"
            )

    def end(self) -> None:
        """Wait until all have come to their end: torchrun ends those that have not when one has failed."""
        if self.size > 1:
            with suppress(RuntimeError):  # one is gone already
                dist.monitored_barrier(timeout=PATIENCE)

    def _gathered(self, value: Any) -> list[Any]:
        box: list[Any] = [None] * self.size
        with _talking():
            dist.all_gather_object(box, value)
        return box


ALONE = Team()


@contextmanager
def joined() -> Iterator[Team]:
    """The team that the environment tells of, as torchrun sets it; without that this process alone.

    Raises:
        ValueError: the environment tells half of it.
        RunError: the processes do not find each other.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        yield Team()
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"the environment tells of several processes, but not {' and '.join(missing)}: start them by torchrun, or "
            "unset RANK and WORLD_SIZE for one process"
        )
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if rank >= size:
        raise ValueError(f"there is no process RANK={rank} of WORLD_SIZE={size}: start processes by torchrun")
    if size == 1:
        yield Team()
        return
    try:
        dist.init_process_group("gloo", rank=rank, world_size=size)
    except (RuntimeError, ValueError) as error:
        raise RunError(f"process {rank} of {size} does not find the others: {error}") from error
    try:
        yield Team(rank, size)
    finally:
        dist.destroy_process_group()


def together(config: AnyConfig, team: Team) -> AnyConfig:
    """The config of a run that a team learns.

    Raises:
        ValueError: the team cannot learn it, or it is for another number of processes.
    """
    if not isinstance(config, Config):
        if team.size > 1:
            raise ValueError(f"games are learned by one process: start {config.benchmark} without torchrun")
        return config
    if config.processes not in (1, team.size):
        raise ValueError(
            f"processes is {config.processes}, and {team.size} run here: start the run by "
            f"torchrun --nproc-per-node {config.processes} -m sgp run ..."
        )
    if team.size > 1 and not METHODS[config.method].splits_batches:
        able = [name for name in METHODS if METHODS[name].splits_batches]
        raise ValueError(
            f"{config.method} cannot be learned by {team.size} processes: its steps need whole batches; those that can "
            f"are {', '.join(able)}"
        )
    return replace(config, processes=team.size)


def usual_threads(team: Team) -> int:
    """Of a process: its part of the cores, if there are others; torchrun would leave it one."""
    if team.size == 1:
        return torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes_here(team))


def processes_here(team: Team) -> int:
    """How many of a team are on this machine."""
    return _number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else team.size


def _number(name: str) -> int:
    """Of a variable of the environment."""
    value = os.environ[name]
    if not value.isdecimal():
        raise ValueError(f"{name}={value!r} in the environment is no number: start processes by torchrun")
    return int(value)


@contextmanager
def _talking() -> Iterator[None]:
    """An exchange fails when another process has ended."""
    try:
        yield
    except RuntimeError as error:
        raise TeamError("another process of the run has ended") from error


@contextmanager
def _silence() -> Iterator[None]:
    """Nothing is printed."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield
