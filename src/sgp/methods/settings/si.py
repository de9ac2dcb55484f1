"""Settings and facts of si."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.methods.facts import MethodFacts
from sgp.settings import Settings, setting


@dataclass(frozen=True)
class SISettings(Settings):
    """The penalty of synaptic intelligence."""

    strength: float = setting(0.1, low=0)
    """c of the penalty c sum Omega (theta - theta*)^2."""
    damping: float = setting(0.001, above=0)
    """xi, which keeps importances finite where a parameter hardly moved."""

    penalty_step: Literal["implicit", "explicit"] = "implicit"
    """implicit: steps have the penalty's gradient at their end, which is stable at any strength. explicit: at their
    start, as usual."""


class SIFacts(MethodFacts):
    """Facts of :class:`sgp.methods.si.SI`."""

    name = "si"
    description = "synaptic intelligence: a penalty on change, weighted by what each parameter gave to the loss"
    Settings = SISettings
