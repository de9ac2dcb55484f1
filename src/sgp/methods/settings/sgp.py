"""Settings and facts of sgp."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sgp.methods.facts import MethodFacts
from sgp.methods.settings.gpm import GPMSettings
from sgp.settings import setting


@dataclass(frozen=True)
class SGPSettings(GPMSettings):
    """Settings of SGP."""

    alpha: float = setting(10.0, low=0, high=math.inf)
    """Scale coefficient of Eq. 2: larger protects more, and inf is GPM."""


class SGPFacts(MethodFacts):
    """Facts of :class:`sgp.methods.sgp.SGP`."""

    name = "sgp"
    description = "scaled gradient projection: steps along old directions shrink by their importance"
    Settings = SGPSettings
    projects_steps = True
