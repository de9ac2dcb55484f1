"""SGP (Saha & Roy, AAAI 2023): steps along directions of earlier tasks are scaled by one minus their importance."""

from __future__ import annotations

from dataclasses import dataclass

from sgp.methods.gpm import GPM, GPMSettings


@dataclass(frozen=True)
class SGPSettings(GPMSettings):
    """Settings of SGP."""

    alpha: float = 10.0
    """Scale coefficient of Eq. 2, at least 0: larger protects more, and inf is GPM."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Written so that NaN fails too.
        if not self.alpha >= 0:
            raise ValueError(f"alpha must be at least 0, got {self.alpha}")


class SGP(GPM):
    """Gradient memory in which each basis has an importance."""

    name = "sgp"
    description = "scaled gradient projection: steps along old directions shrink by their importance"
    Settings = SGPSettings
    settings: SGPSettings

    @property
    def alpha(self) -> float:
        return self.settings.alpha
