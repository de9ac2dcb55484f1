"""BatchNorm statistics that a task is evaluated with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from sgp.methods import Method
from sgp.methods.method import use_mode

# Means and variances by the qualified names of their buffers.
NormStatistics = Mapping[str, Tensor]
# Number of examples that stored statistics count for beside those of a test batch, where both are mixed.
STORED_EXAMPLES = 192
BATCH_NORM_SIGNATURE = inspect.signature(F.batch_norm)


class NormPolicy:
    """Decide which BatchNorm statistics each task is evaluated with, and estimate those that are stored.

    Training's own running statistics are not used: they lag behind the weights, and come from maps that dropout has
    scaled up, which moves the means far where a maximum is taken over them, as in AlexNet.

    Args:
        method: Method that trains the network. It says whether the network has one set of statistics, each task has its
            own (the network's must stay as they are for the sake of earlier tasks), or the method owns them.
        mixed: Whether stored statistics are mixed with those of the test batch.
        has_shared_head: Whether all tasks share a head. Then it is not known at test time which task an input is of, so
            no task can have statistics of its own.
    """

    def __init__(self, method: Method[Any], *, mixed: bool, has_shared_head: bool) -> None:
        self._method = method
        self._mixed = mixed
        self._has_shared_head = has_shared_head
        self._tasks: dict[int, NormStatistics] = {}

    @property
    def is_estimated(self) -> bool:
        """Whether statistics are to be estimated after the weights have changed."""
        kind = self._method.norm_statistics
        return kind == "shared" or (kind == "per-task" and not self._has_shared_head)

    def estimate(self, head: int, passes: Iterable[tuple[Tensor, int | Tensor]]) -> None:
        """Estimate the statistics of a task for the weights as they are.

        Args:
            head: Head of the task.
            passes: Inputs, and the head of their task or of each of them.
        """
        statistics = estimate_statistics(self._method.network, passes)
        if self._method.norm_statistics == "per-task":
            self._tasks[head] = statistics
        else:
            store_statistics(self._method.network, statistics)

    @contextmanager
    def use_statistics(self, head: int) -> Iterator[None]:
        """Replace the network's statistics by the task's own inside the context, if the task has any."""
        replaced: list[tuple[nn.Module, str, Tensor]] = []
        for name, value in self._tasks.get(head, {}).items():
            layer, _, key = name.rpartition(".")
            module = self._method.network.get_submodule(layer)
            replaced.append((module, key, getattr(module, key)))
            # Another tensor instead of other values: a backward pass may still need the values that were there.
            setattr(module, key, value)
        try:
            yield
        finally:
            for module, key, value in replaced:
                setattr(module, key, value)

    @contextmanager
    def evaluate_task(self, head: int) -> Iterator[None]:
        """Let BatchNorm use the statistics that a task is evaluated with inside the context."""
        with self.use_statistics(head), MixedNorm(STORED_EXAMPLES) if self._mixed else nullcontext():
            yield

    @property
    def nbytes(self) -> int:
        """Size in bytes of the statistics of single tasks."""
        return sum(value.nbytes for value in self.state_dict().values())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the statistics of single tasks under the names `task/buffer`."""
        return {f"{task}/{name}": value for task, own in self._tasks.items() for name, value in own.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a `state_dict`."""
        tasks: dict[int, dict[str, Tensor]] = {}
        for path, value in state.items():
            task, name = path.split("/")
            tasks.setdefault(int(task), {})[name] = value
        self._tasks = dict(tasks)


@torch.no_grad()
def estimate_statistics(network: nn.Module, passes: Iterable[tuple[Tensor, int | Tensor]]) -> NormStatistics:
    """Return the means and variances of BatchNorm's inputs, averaged over some passes, with dropout off.

    Args:
        network: Network called as `network(inputs, head)`; its modes and statistics are restored afterwards.
        passes: Inputs, and the head of their task or of each of them.
    """
    norms = {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, _BatchNorm) and module.track_running_stats
    }
    if not norms:
        return {}
    found: dict[str, list[Tensor]] = {}

    def record(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        variance, mean = torch.var_mean(args[0], _get_reduced_dims(args[0]))
        found.setdefault(f"{name}.running_mean", []).append(mean)
        found.setdefault(f"{name}.running_var", []).append(variance)

    with use_mode(network, training=False), ExitStack() as hooks:
        for name, norm in norms.items():
            hooks.enter_context(norm.register_forward_pre_hook(partial(record, name)))
        for norm in norms.values():
            # Normalize by the batch without counting it: a method may rely on the stored values.
            norm.train()
            norm.track_running_stats = False
        try:
            for inputs, head in passes:
                network(inputs, head)
        finally:
            for norm in norms.values():
                norm.track_running_stats = True
    return {name: torch.stack(values).mean(0) for name, values in found.items()}


@torch.no_grad()
def store_statistics(network: nn.Module, statistics: NormStatistics) -> None:
    """Copy statistics to the network's own buffers."""
    for name, value in statistics.items():
        network.get_buffer(name).copy_(value)


class MixedNorm(TorchFunctionMode):
    """Let BatchNorm in eval mode mix stored statistics with those of the batch inside the context.

    Statistics of a small batch are noisy, and stored ones fall behind where later tasks change the weights; the mean
    and variance of a set of both together suffer less from either. The modules are not changed: the mode replaces the
    function that all of them call.

    Args:
        examples: Number of examples that the stored statistics count for; with 0 the batch is normalized by its own.
    """

    def __init__(self, examples: int) -> None:
        super().__init__()
        self.examples = examples

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        return self._normalize(**BATCH_NORM_SIGNATURE.bind(*args, **(kwargs or {})).arguments)

    def _normalize(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool = False,
        **others: Any,
    ) -> Tensor:
        if not training and running_mean is not None and running_var is not None:
            variance, mean = torch.var_mean(input, _get_reduced_dims(input), correction=0)
            share = self.examples / (self.examples + len(input))
            between = share * (1 - share) * (mean - running_mean).square()
            running_var = torch.lerp(variance, running_var, share) + between
            running_mean = torch.lerp(mean, running_mean, share)
        return F.batch_norm(input, running_mean, running_var, training=training, **others)


def _get_reduced_dims(x: Tensor) -> list[int]:
    """Return the dimensions that BatchNorm reduces: all but the channels."""
    return [dimension for dimension in range(x.dim()) if dimension != 1]
