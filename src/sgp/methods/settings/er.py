"""Settings and facts of er."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.methods.facts import MethodFacts
from sgp.methods.settings.replay import ReplaySettings


@dataclass(frozen=True)
class ERSettings(ReplaySettings):
    """Settings of experience replay."""

    reservoir: Literal["uniform", "one-less"] = "uniform"
    """Sample that the memory is: of all examples alike, or of later ones a little more, as in the published code."""


class ERFacts(MethodFacts):
    """Facts of :class:`sgp.methods.er.ER`."""

    name = "er"
    description = "experience replay: every step trains on some stored examples of old tasks again"
    Settings = ERSettings
    keeps_data = True
    supervised_only = True
