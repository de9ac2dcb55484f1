"""Settings and facts of trgp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.methods.facts import MethodFacts
from sgp.methods.settings.gpm import GPMSettings
from sgp.settings import setting


@dataclass(frozen=True)
class TRGPSettings(GPMSettings):
    """The memory of TRGP, and which old tasks a new one trusts."""

    trust_threshold: float = setting(0.5, low=0, high=1)
    """Share of a layer's gradient norm that must lie in an old task's space for it to be trusted."""
    trust_tasks: int = setting(2, low=0)
    """The most tasks that a layer trusts; with 0 this is GPM with another choice of bases."""
    trust_samples: int = setting(125, low=1)
    """How many training inputs that gradient is of."""
    appended: Literal["all", "all-but-strongest"] = "all"
    """Which new directions of a task are protected: all, or all but the strongest as in the published code."""
    scaling: Literal["by-layer", "by-first-layer"] = "by-layer"
    """Scale each layer that trusts a task; or all of them only if the first layer does, as in the published code."""
    representation: Literal["scaled", "plain"] = "scaled"
    """Which network's inputs a task's bases are found from: the one that answers the task, with scaled weights; or the
    plain one, without scales, as in the published code."""
    unscaled: str = ""
    """Pattern on names of layers that are never scaled; empty for none."""
    norms: Literal["freeze", "free"] = "freeze"
    """What happens to norm layers after the first task; the published code for Split CIFAR-100 trains them on."""


class TRGPFacts(MethodFacts):
    """Facts of :class:`sgp.methods.trgp.TRGP`."""

    name = "trgp"
    description = "trust region gradient projection: GPM, with weights scaled in the spaces of trusted old tasks"
    Settings = TRGPSettings
    supervised_only = True
    projects_steps = True
