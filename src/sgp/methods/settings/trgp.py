"""Settings and facts of trgp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.methods.facts import MethodFacts
from sgp.methods.settings.gpm import GPMSettings
from sgp.settings import setting


@dataclass(frozen=True)
class TRGPSettings(GPMSettings):
    """Settings of TRGP."""

    trust_threshold: float = setting(0.5, low=0, high=1)
    """Share of a layer's gradient norm that must lie in an old task's space for the task to be trusted."""
    trust_tasks: int = setting(2, low=0)
    """Largest number of tasks that a layer trusts; 0 is GPM with another choice of bases."""
    trust_samples: int = setting(125, low=1)
    """Number of training inputs that the gradient for trust is computed from."""
    appended: Literal["all", "all-but-strongest"] = "all"
    """New directions of a task that are protected: all, or all but the strongest as in the published code."""
    scaling: Literal["by-layer", "by-first-layer"] = "by-layer"
    """Scale each layer that trusts a task; or all of them only if the first layer does, as in the published code."""
    representation: Literal["scaled", "plain"] = "scaled"
    """Network whose inputs a task's bases are computed from: the task's own, with scaled weights; or the plain one,
    without scales, as in the published code."""
    unscaled: str = ""
    """Pattern on names of layers that are never scaled; empty for none."""
    norms: Literal["freeze", "free"] = "freeze"
    """Treatment of norm layers after the first task; the published code for Split CIFAR-100 keeps training them."""


class TRGPFacts(MethodFacts):
    """Facts of :class:`sgp.methods.trgp.TRGP`."""

    name = "trgp"
    description = "trust region gradient projection: GPM, with weights scaled in the spaces of trusted old tasks"
    Settings = TRGPSettings
    supervised_only = True
    projects_steps = True
