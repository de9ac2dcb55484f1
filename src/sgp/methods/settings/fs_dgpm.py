"""Settings and facts of fs-dgpm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sgp.methods.facts import MethodFacts
from sgp.methods.settings.gpm import GPMSettings
from sgp.methods.settings.replay import ReplaySettings
from sgp.settings import setting


@dataclass(frozen=True)
class FSDGPMSettings(GPMSettings, ReplaySettings):
    """Settings of FS-DGPM."""

    memory_size: int = setting(1000, low=2)
    """Largest number of stored examples of all tasks together."""
    sharpness_lr: float = setting(0.001, low=0)
    """Learning rate eta_1 of the steps uphill that look for sharpness; it falls as the learning rate does."""
    soft_lr: float = setting(0.01, low=0)
    """Learning rate eta_2 of the bases' soft weights; it falls as the learning rate does."""
    inner_steps: int = setting(2, low=1)
    """Number of steps uphill, each on its part of the batch."""
    second_order: bool = False
    """Differentiate through the gradients of the steps uphill too."""
    soft_weights: Literal["repeated", "once", "orphaned"] = "repeated"
    """How soft weights are learned. repeated: lambda := sigmoid(10 (lambda - eta_2 g)) in each step. once: lambda =
    sigmoid(10 u), u := u - eta_2 g, so that steps add up. orphaned: lambda := sigmoid(10 lambda), which no gradient
    reaches, as in the published code."""
    momentum: float = setting(0.0, low=0, below=1)
    """Momentum of weights and soft weights; the published code uses 0.9."""
    clip: float = setting(math.inf, above=0, high=math.inf)
    """Largest entry of a step uphill, and largest norm of the gradient; the published code uses 2."""
    norms: Literal["freeze", "free"] = "freeze"
    """Treatment of norm layers after the first task; the published code for Split CIFAR-100 keeps training them."""


class FSDGPMFacts(MethodFacts):
    """Facts of :class:`sgp.methods.fs_dgpm.FSDGPM`."""

    name = "fs-dgpm"
    description = "flattened sharpness and dynamic gradient projection: replay, and bases with learned weights"
    Settings = FSDGPMSettings
    keeps_data = True
    supervised_only = True
    projects_steps = True
