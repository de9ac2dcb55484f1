"""Settings and facts of der."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.methods.facts import MethodFacts
from sgp.methods.settings.replay import ReplaySettings
from sgp.settings import setting


@dataclass(frozen=True)
class DERSettings(ReplaySettings):
    """Settings of dark experience replay."""

    fill: Literal["first-epoch", "every-epoch"] = "every-epoch"
    """When examples are offered to the memory. In a task's first epoch their logits come from a network that has hardly
    learned it, so the default is every epoch, as in the published code."""
    alpha: float = setting(0.1, low=0)
    """Weight of the squared distance to the stored logits."""
    beta: float = setting(0.0, low=0)
    """Weight of the cross-entropy of stored examples; above 0 the method is DER++."""


class DERFacts(MethodFacts):
    """Facts of :class:`sgp.methods.der.DER`."""

    name = "der"
    description = "dark experience replay: logits of stored examples should stay as they were"
    Settings = DERSettings
    keeps_data = True
    supervised_only = True
