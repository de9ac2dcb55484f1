"""Settings and facts of owm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sgp.methods.facts import MethodFacts
from sgp.settings import Settings, setting


@dataclass(frozen=True)
class OWMSettings(Settings):
    """Settings of OWM."""

    alpha_start: float = setting(1.0, above=0)
    """Regularizer alpha at the start of each task: smaller blocks mean inputs more."""
    alpha_decay: float | dict[str, float] = setting(0.01, above=0, high=1)
    """Factor of alpha over a task; or by pattern on layer names."""
    update: Literal["task", "step"] = "task"
    """When projectors are updated: once a task is learned, as its authors write, or at each of its steps, as in the
    published code."""
    clip_norm: float = setting(10.0, above=0, high=math.inf)
    """Largest norm of the gradient of all parameters."""


class OWMFacts(MethodFacts):
    """Facts of :class:`sgp.methods.owm.OWM`."""

    name = "owm"
    description = "orthogonal weights modification: steps are orthogonal to mean inputs of earlier tasks"
    Settings = OWMSettings
    supervised_only = True
