"""Settings and facts of si."""

from __future__ import annotations

from dataclasses import dataclass

from sgp.methods.facts import MethodFacts
from sgp.methods.settings.penalty import PenaltySettings
from sgp.settings import setting


@dataclass(frozen=True)
class SISettings(PenaltySettings):
    """Penalty of synaptic intelligence."""

    strength: float = setting(0.1, low=0)
    """c of the penalty c sum Omega (theta - theta*)^2."""
    damping: float = setting(0.001, above=0)
    """xi, which keeps importances finite where a parameter hardly moved."""


class SIFacts(MethodFacts):
    """Facts of :class:`sgp.methods.si.SI`."""

    name = "si"
    description = "synaptic intelligence: a penalty on change, weighted by each parameter's contribution to the loss"
    Settings = SISettings
