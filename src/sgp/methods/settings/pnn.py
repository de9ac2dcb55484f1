"""Settings and facts of pnn."""

from __future__ import annotations

from dataclasses import dataclass

from sgp.methods.facts import MethodFacts
from sgp.settings import Settings, setting


@dataclass(frozen=True)
class PNNSettings(Settings):
    """Settings of PNN."""

    column_width: float = setting(1.0, above=0, high=1)
    """Units of a column's hidden layers as a share of the network's; each layer keeps at least one."""
    scale_deviation: float = setting(0.1, above=0)
    """Standard deviation of the scales a_j of a new column, which are normal around 0."""


class PNNFacts(MethodFacts):
    """Facts of :class:`sgp.methods.pnn.PNN`."""

    name = "pnn"
    description = "progressive networks: a column for each task, frozen afterwards, that feeds later columns"
    Settings = PNNSettings
    supervised_only = True
