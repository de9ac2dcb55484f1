"""Settings and facts of a-gem."""

from __future__ import annotations

from dataclasses import dataclass

from sgp.methods.facts import MethodFacts
from sgp.methods.settings.replay import ReplaySettings
from sgp.settings import setting


@dataclass(frozen=True)
class AGEMSettings(ReplaySettings):
    """Settings of A-GEM."""

    per_class: int | None = setting(None, low=1)
    """Largest number of stored examples of one class; none: the classes so far share the memory evenly."""


class AGEMFacts(MethodFacts):
    """Facts of :class:`sgp.methods.a_gem.AGEM`."""

    name = "a-gem"
    description = "averaged gradient episodic memory: no step against the gradient on stored examples of old tasks"
    Settings = AGEMSettings
    keeps_data = True
    supervised_only = True
