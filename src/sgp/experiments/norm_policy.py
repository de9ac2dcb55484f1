"""Stored statistics of BatchNorm, estimated for the weights as they are and for the network as it is used at test.

Those that training gathers on its way do not fit either: they lag behind the weights, and come from maps that dropout
has been at. Where a maximum is taken over what dropout has scaled up, as in AlexNet, that moves the means far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sgp.experiments.batch_norm import but_channels

# Means and variances by the qualified names of their buffers.
Statistics = Mapping[str, Tensor]


@torch.no_grad()
def estimate_statistics(network: nn.Module, batches: Iterable[tuple[Tensor, int | Tensor]]) -> Statistics:
    """Means and variances over some batches, with dropout off, as a plain mean over them; empty if none are stored.

    Args:
        network: `network(inputs, head)`; it is as before afterwards, with the statistics that it had.
        batches: inputs, and the head of their task, or of each of them.
    """
    norms = {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
    }
    if not norms:
        return {}
    modes = {module: module.training for module in network.modules()}
    seen: dict[str, list[Tensor]] = {}

    def look(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        variance, mean = torch.var_mean(args[0], but_channels(args[0]))
        seen.setdefault(f"{name}.running_mean", []).append(mean)
        seen.setdefault(f"{name}.running_var", []).append(variance)

    with ExitStack() as hooks:
        for name, norm in norms.items():
            hooks.callback(norm.register_forward_pre_hook(partial(look, name)).remove)
        network.eval()
        for norm in norms.values():
            # By the batch, and without counting it: a method may hold on to what is stored.
            norm.train()
            norm.track_running_stats = False
        try:
            for inputs, head in batches:
                network(inputs, head)
        finally:
            for norm in norms.values():
                norm.track_running_stats = True
            for module, mode in modes.items():
                module.training = mode
    return {name: torch.stack(values).mean(0) for name, values in seen.items()}


@torch.no_grad()
def put_statistics(network: nn.Module, statistics: Statistics) -> None:
    """Write them to the network's own buffers."""
    for name, value in statistics.items():
        network.get_buffer(name).copy_(value)


class TaskStatistics:
    """Statistics of single tasks, for a network whose own must stay as an earlier task left them."""

    def __init__(self) -> None:
        self._tasks: dict[int, Statistics] = {}

    def keep(self, task: int, statistics: Statistics) -> None:
        """Take in those of a task, in place of any it had."""
        self._tasks[task] = statistics

    @contextmanager
    def of(self, task: int, network: nn.Module) -> Iterator[None]:
        """A task's in place of the network's own for a while; nothing happens if it has none."""
        before: list[tuple[nn.Module, str, Tensor]] = []
        for name, value in self._tasks.get(task, {}).items():
            layer, _, key = name.rpartition(".")
            module = network.get_submodule(layer)
            before.append((module, key, getattr(module, key)))
            # Another tensor, not other values: a backward pass may still need those that stood there.
            setattr(module, key, value)
        try:
            yield
        finally:
            for module, key, value in before:
                setattr(module, key, value)

    @property
    def nbytes(self) -> int:
        """Bytes of all tasks' together."""
        return sum(value.nbytes for value in self.state_dict().values())

    def state_dict(self) -> dict[str, Tensor]:
        """Each as `task/buffer`."""
        return {f"{task}/{name}": value for task, own in self._tasks.items() for name, value in own.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state_dict`."""
        tasks: dict[int, dict[str, Tensor]] = {}
        for path, value in state.items():
            task, name = path.split("/")
            tasks.setdefault(int(task), {})[name] = value
        self._tasks = dict(tasks)
