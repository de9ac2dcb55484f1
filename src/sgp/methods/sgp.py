"""SGP (Saha & Roy, AAAI 2023): steps along directions of earlier tasks are scaled by one minus their importance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sgp.methods.gpm import GPM, GPMSettings


@dataclass(frozen=True)
class SGPSettings(GPMSettings):
    """The memory of SGP."""

    alpha: float = 10.0
    """Scale coefficient of Eq. 2, at least 0: larger protects more, and inf is GPM."""

    project_again: float = 0.0
    """How far the weights go, after each epoch of a task but the last, to where the projection of their whole change
    since the task began would have them, in [0, 1]. Steps along a basis are only scaled, and many still lead far."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Written so that NaN fails too.
        if not self.alpha >= 0:
            raise ValueError(f"alpha must be at least 0, got {self.alpha}")
        if not 0 <= self.project_again <= 1:
            raise ValueError(f"project_again must be in [0, 1], got {self.project_again}")


class SGP(GPM):
    """A gradient memory in which each basis has an importance."""

    name = "sgp"
    description = "scaled gradient projection: steps along old directions shrink by their importance"
    Settings = SGPSettings
    settings: SGPSettings

    @property
    def looks_back(self) -> bool:
        return self.settings.project_again > 0 and self.memory.tasks > 0

    def between_epochs(self, before: Mapping[str, Tensor]) -> None:
        self.memory.project_since(before, self.settings.project_again)

    @staticmethod
    def _alpha(settings: GPMSettings) -> float:
        assert isinstance(settings, SGPSettings)
        return settings.alpha
