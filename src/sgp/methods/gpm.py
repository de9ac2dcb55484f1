"""GPM (Saha, Garg & Roy, ICLR 2021): no step along any direction that an earlier task's inputs span."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from sgp.methods.method import Batch, Method
from sgp.projection import GradientMemory, Numerics
from sgp.projection.layout import check_patterns, matches

N = TypeVar("N", int, float)


@dataclass(frozen=True)
class GPMSettings:
    """The memory of GPM."""

    threshold: float | dict[str, float] = 0.97
    """Share of each layer's input energy that the bases must hold, in (0, 1]; or by pattern on layer names."""
    threshold_step: float = 0.0
    """What is added to the threshold for every later task; it stops at 1."""
    memory_samples: int | dict[str, int] = 125
    """How many training inputs the bases are found from; by pattern on layer names, each layer its own."""
    first_rank: Literal["minimal", "one-less"] = "minimal"
    """Rank of the first task's bases: what Eq. 1 demands, or one less as in the published code."""
    truncation: Literal["before", "after"] = "before"
    """When bases beyond a layer's dimension are dropped: before importances are scaled, or after as published."""
    orthogonalise: bool = True
    """Make new bases orthogonal to the old ones again; the published code does not."""
    bias: Literal["protect", "freeze"] = "protect"
    """Protect biases like weights, or freeze them after the first task as published."""

    def __post_init__(self) -> None:
        for threshold in _values(self.threshold):
            if not 0 < threshold <= 1:
                raise ValueError(f"threshold must be in (0, 1], got {threshold}")
        if not 0 <= self.threshold_step < 1:
            raise ValueError(f"threshold_step must be in [0, 1), got {self.threshold_step}")
        for count in _values(self.memory_samples):
            if count < 1:
                raise ValueError(f"memory_samples must be at least 1, got {count}")


class GPM(Method[GPMSettings]):
    """A gradient memory in which every basis is blocked."""

    name = "gpm"
    description = "gradient projection memory: no step along directions of earlier tasks"
    Settings: ClassVar[type[GPMSettings]] = GPMSettings
    Memory: ClassVar[type[GradientMemory]] = GradientMemory

    def __init__(self, network: nn.Module, settings: GPMSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        start, step = settings.threshold, settings.threshold_step
        self.memory = self.Memory(
            network,
            threshold={name: partial(_threshold, value, step) for name, value in start.items()}
            if isinstance(start, dict)
            else partial(_threshold, start, step),
            alpha=self._alpha(settings),
            exclude=exclude,
            bias=settings.bias,
            rest=self._rest(settings),
            numerics=Numerics(settings.first_rank, settings.truncation, settings.orthogonalise),
            # The run's own checkpoint has the weights.
            anchor=False,
        )
        if isinstance(settings.memory_samples, dict):  # better now than after a task has been trained
            layers = [layer.layer for layer in self.memory.capacity().layers]
            check_patterns(network, settings.memory_samples, "memory_samples", layers)
            for layer in layers:
                if not matches(layer, list(settings.memory_samples)):
                    raise ValueError(f"memory_samples: no pattern matches the layer {layer!r}; add one, such as '*'")

    @staticmethod
    def _alpha(settings: GPMSettings) -> float:
        return math.inf

    @staticmethod
    def _rest(settings: GPMSettings) -> Literal["freeze", "free"]:
        return "freeze"

    def attach(self, optimizer: Optimizer) -> None:
        self.memory.attach(optimizer)

    @property
    def keeps_statistics(self) -> bool:
        return self.memory.tasks > 0

    @property
    def consolidation_batch(self) -> int:
        # All at once: where BatchNorm divides by the batch's own statistics they are those of this one batch.
        return max(_values(self.settings.memory_samples))

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        with warnings.catch_warnings():
            # Runs report the free share of every layer after every task.
            warnings.filterwarnings("ignore", message=".*blocked and can hardly", category=UserWarning)
            self.memory.update(
                batches,
                samples=self.settings.memory_samples,
                forward=log_likelihood,
                # After a resume the training steps were those of another process.
                allow_unattached=True,
            )

    def state_dict(self) -> dict[str, Any]:
        return self.memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.memory.load_state_dict(state)

    def bytes(self) -> dict[str, int]:
        spaces = {id(space): space for space in self.memory.subspaces.values()}.values()
        basis = sum(space.basis.nbytes for space in spaces)
        importance = sum(space.importance.nbytes for space in spaces)
        return {"bases": basis} | ({} if math.isinf(self.memory.alpha) else {"importances": importance})

    def free(self) -> dict[str, float]:
        return {layer.layer: layer.free for layer in self.memory.capacity().layers}


def _threshold(start: float, step: float, task: int) -> float:
    """Of the task at a position, from 0."""
    return min(1.0, start + step * task)


def _values(setting: N | dict[str, N]) -> list[N]:
    """What a setting says of any layer."""
    return list(setting.values()) if isinstance(setting, dict) else [setting]
