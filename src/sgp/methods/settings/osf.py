"""Settings and facts of osf."""

from __future__ import annotations

from dataclasses import dataclass

from sgp.methods.facts import MethodFacts
from sgp.settings import Settings, setting


@dataclass(frozen=True)
class OSFSettings(Settings):
    """Settings of OSF."""

    preserved: float = setting(0.5, above=0, below=1)
    """Share of each weight's singular directions that is kept as it is."""


class OSFFacts(MethodFacts):
    """Facts of :class:`sgp.methods.osf.OSF`."""

    name = "osf"
    description = "orthogonal subspace fine-tuning of PEFT: the strongest singular directions of weights are kept"
    Settings = OSFSettings
    supervised_only = True
    packages = ("peft",)
