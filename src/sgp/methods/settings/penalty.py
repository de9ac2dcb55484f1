"""Settings that methods with a quadratic penalty share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.settings import Settings


@dataclass(frozen=True)
class PenaltySettings(Settings):
    """Settings of a quadratic penalty."""

    penalty_step: Literal["implicit", "explicit"] = "implicit"
    """implicit: take the penalty's gradient at the end of a step, which is stable at any strength. explicit: take it at
    the start, as usual."""
