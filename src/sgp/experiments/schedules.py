"""The learning rate inside a task, and when the task ends."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import Any

from sgp.experiments.config import SupervisedSettings


@dataclass
class Schedule(ABC):
    """Of one task; made anew for each.

    Attributes:
        training: the settings.
        epochs: how many have been observed.
    """

    training: SupervisedSettings
    epochs: int = field(default=0, init=False)

    @abstractmethod
    def rate(self, progress: float) -> float:
        """The rate at a share of the coming epoch, from 0 to 1."""

    def observe(self, validation_loss: float | None) -> bool:
        """Take in an epoch's validation loss, if there is one; whether to keep the weights for the task's end."""
        self.epochs += 1
        return False

    @property
    def done(self) -> bool:
        """Whether the task has been learned."""
        return self.epochs >= self.training.epochs

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {name: value for name, value in asdict(self).items() if name != "training"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        for name, value in state.items():
            setattr(self, name, value)


@dataclass
class Constant(Schedule):
    """One rate; the last weights are kept."""

    def rate(self, progress: float) -> float:
        return self.training.lr


@dataclass
class Cosine(Schedule):
    """From the full rate to 0 along half a cosine; the last weights are kept."""

    def rate(self, progress: float) -> float:
        share = (self.epochs + progress) / self.training.epochs
        return 0.5 * self.training.lr * (1 + math.cos(math.pi * share))


@dataclass
class Linear(Schedule):
    """From the full rate to 0 in a straight line; the last weights are kept."""

    def rate(self, progress: float) -> float:
        return self.training.lr * (1 - (self.epochs + progress) / self.training.epochs)


@dataclass
class Patience(Schedule):
    """The published early stopping: the rate is divided each time the validation loss has not improved for a while.

    Weights are not taken back when the rate is divided, only at the end of the task.
    """

    lr: float = field(default=0.0, init=False)
    left: int = field(default=0, init=False)
    # None rather than infinity, which JSON has not.
    best: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.lr, self.left = self.training.lr, self.training.patience

    def rate(self, progress: float) -> float:
        return self.lr

    def observe(self, validation_loss: float | None) -> bool:
        super().observe(validation_loss)
        assert validation_loss is not None
        if self.best is None or validation_loss < self.best:
            self.best, self.left = validation_loss, self.training.patience
            return True
        self.left -= 1
        if self.left == 0:
            self.lr, self.left = self.lr / self.training.lr_factor, self.training.patience
        return False

    @property
    def done(self) -> bool:
        # As published, lr_min is looked at when the rate has been divided: one that starts below it has its time too.
        return super().done or self.lr < min(self.training.lr, self.training.lr_min)


SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "linear": Linear,
    "patience": Patience,
}
