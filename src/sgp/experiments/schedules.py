"""Learning rate schedules of a task, which also decide when the task ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from sgp.experiments.config import SupervisedSettings

# Factors of the learning rate at a share of the task.
DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
    "linear": lambda share: 1 - share,
}


@dataclass
class Schedule:
    """Schedule of one task: a decay over all its epochs, after which the task ends with the last weights.

    Attributes:
        training: Settings of the trainer.
        epochs: Number of epochs that have ended.
    """

    training: SupervisedSettings
    epochs: int = field(default=0, init=False)

    def get_lr(self, progress: float) -> float:
        """Return the learning rate at a share of the current epoch, from 0 to 1."""
        return self.training.lr * DECAYS[self.training.schedule]((self.epochs + progress) / self.training.epochs)

    def observe(self, validation_loss: float | None) -> bool:
        """End an epoch, and return whether its weights are the best so far, which the task then ends with."""
        self.epochs += 1
        return False

    @property
    def done(self) -> bool:
        """Whether the task ends here."""
        return self.epochs >= self.training.epochs

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return {name: value for name, value in asdict(self).items() if name != "training"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        for name, value in state.items():
            setattr(self, name, value)


@dataclass
class Patience(Schedule):
    """Early stopping as published: divide the learning rate whenever the validation loss has stopped improving.

    The task ends with the best weights. They are not restored when the learning rate is divided.
    """

    lr: float = field(default=0.0, init=False)
    left: int = field(default=0, init=False)
    # None instead of infinity, which JSON cannot represent.
    best: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.lr, self.left = self.training.lr, self.training.patience

    def get_lr(self, progress: float) -> float:
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
        # As published, lr_min is compared after a division only, so a learning rate that starts below it is used too.
        return super().done or self.lr < min(self.training.lr, self.training.lr_min)


def make_schedule(training: SupervisedSettings) -> Schedule:
    """Return the schedule of a task."""
    return Patience(training) if training.schedule == "patience" else Schedule(training)
