"""Settings and facts of frozen."""

from __future__ import annotations

from dataclasses import dataclass

from sgp.methods.facts import MethodFacts
from sgp.settings import Settings, setting


@dataclass(frozen=True)
class FrozenSettings(Settings):
    """Settings of linear heads on fixed features."""

    head_decay: float = setting(1e-3, above=0)
    """mu of the penalty mu/2 |W|^2 on a head's weights; without a penalty, classes that can be separated have no best
    head."""


class FrozenFacts(MethodFacts):
    """Facts of :class:`sgp.methods.frozen.Frozen`."""

    name = "frozen"
    description = "heads on an unchanged network: the control for pretrained networks"
    Settings = FrozenSettings
    supervised_only = True
