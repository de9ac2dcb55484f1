"""SGP (Saha & Roy, AAAI 2023): steps along directions of earlier tasks are scaled by one minus their importance."""

from __future__ import annotations

from sgp.methods.gpm import GPM
from sgp.methods.settings import SGPFacts, SGPSettings


class SGP(SGPFacts, GPM):
    """Gradient memory in which each basis has an importance."""

    settings: SGPSettings

    @property
    def alpha(self) -> float:
        return self.settings.alpha
