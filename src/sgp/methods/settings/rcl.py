"""Settings and facts of rcl."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.methods.facts import MethodFacts
from sgp.settings import Settings, setting


@dataclass(frozen=True)
class RCLSettings(Settings):
    """Settings of RCL: how a task searches for its number of units."""

    trials: int = setting(10, low=1)
    """Number of choices of units that each task tries."""
    trial_epochs: int = setting(2, low=1)
    """Number of epochs that a trial is trained before it is evaluated."""
    most_units: int | dict[str, int] = setting(29, low=0)
    """Largest number of units that a task may add to each layer; or by pattern on layer names."""
    size_penalty: float = setting(1e-4, low=0)
    """xi of the reward, accuracy - xi units added."""
    judged: float = setting(0.1, above=0, below=1)
    """Share of the task's training examples that trials are evaluated on and not trained on."""
    l2: float = setting(1e-4, low=0)
    """Weight decay of everything that is trained."""
    controller_units: int = setting(100, low=1)
    """Number of units of each of the controller's two layers."""
    controller_lr: float = setting(0.001, above=0)
    """Learning rate of Adam for the controller."""
    value_lr: float = setting(0.005, above=0)
    """Learning rate of Adam for the value that rewards are compared with."""
    deep_units: Literal["learned", "as-drawn"] = "learned"
    """Weights into new units of all layers but the first: learned, or left as they were drawn as in the published
    code."""


class RCLFacts(MethodFacts):
    """Facts of :class:`sgp.methods.rcl.RCL`."""

    name = "rcl"
    description = "a controller learns by reinforcement how many units each task adds; old weights never move"
    Settings = RCLSettings
    supervised_only = True
