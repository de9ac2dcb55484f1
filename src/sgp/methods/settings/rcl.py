"""Settings and facts of rcl."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.methods.facts import MethodFacts
from sgp.settings import Settings, setting


@dataclass(frozen=True)
class RCLSettings(Settings):
    """How a task searches for its units."""

    trials: int = setting(10, low=1)
    """How many choices of units each task tries."""
    trial_epochs: int = setting(2, low=1)
    """How long each is trained before it is judged."""
    most_units: int | dict[str, int] = setting(29, low=0)
    """The most that a task may add to each layer; or by pattern on layer names."""
    size_penalty: float = setting(1e-4, low=0)
    """xi of the reward, accuracy - xi units added."""
    judged: float = setting(0.1, above=0, below=1)
    """Share of the task's training examples that trials are judged by and not trained on."""
    l2: float = setting(1e-4, low=0)
    """Decay of what is trained."""
    controller_units: int = setting(100, low=1)
    """Of each of the controller's two layers."""
    controller_lr: float = setting(0.001, above=0)
    """Rate of the controller's Adam."""
    value_lr: float = setting(0.005, above=0)
    """Rate of Adam for the value that rewards are compared with."""
    deep_units: Literal["learned", "as-drawn"] = "learned"
    """Weights into new units of all layers but the first: learned, or left as they were drawn as in the published
    code."""


class RCLFacts(MethodFacts):
    """Facts of :class:`sgp.methods.rcl.RCL`."""

    name = "rcl"
    description = "a controller learns by reinforcement how many units each task adds; old weights never move"
    Settings = RCLSettings
    supervised_only = True
