"""Settings and facts of gpm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.methods.facts import MethodFacts
from sgp.settings import Settings, setting


@dataclass(frozen=True)
class GPMSettings(Settings):
    """Settings of GPM."""

    threshold: float | dict[str, float] = setting(0.97, above=0, high=1)
    """Share of each layer's input energy that the bases must capture; or by pattern on layer names."""
    threshold_step: float = setting(0.0, low=0, below=1)
    """Increase of the threshold for every later task; it stops at 1."""
    memory_samples: int | dict[str, int] = setting(125, low=1)
    """Number of training inputs that the bases are computed from; or by pattern on layer names."""
    first_rank: Literal["minimal", "one-less"] = "minimal"
    """Rank of the first task's bases: as Eq. 1 requires, or one less as in the published code."""
    truncation: Literal["before", "after"] = "before"
    """When bases beyond a layer's dimension are dropped: before importances are scaled, or after as in the published
    code."""
    orthogonalise: bool = True
    """Make new bases orthogonal to the old ones again; the published code does not."""
    bias: Literal["protect", "freeze"] = "protect"
    """Protect biases like weights, or freeze them after the first task as in the published code."""
    project_every: int = setting(1, low=1)
    """Number of steps whose change is projected at once; 1 is the paper's algorithm, more is cheaper."""


class GPMFacts(MethodFacts):
    """Facts of :class:`sgp.methods.gpm.GPM`."""

    name = "gpm"
    description = "gradient projection memory: no step along directions of earlier tasks"
    Settings = GPMSettings
    projects_steps = True
