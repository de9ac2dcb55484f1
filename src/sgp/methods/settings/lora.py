"""Settings and facts of lora."""

from __future__ import annotations

from dataclasses import dataclass

from sgp.methods.facts import MethodFacts
from sgp.settings import Settings, setting


@dataclass(frozen=True)
class LoRASettings(Settings):
    """Settings of LoRA."""

    lora_rank: int = setting(8, low=1)
    """Rank r of the change of each weight."""
    lora_scale: float = setting(16.0, above=0)
    """Scale s; the change is multiplied by s / r."""


class LoRAFacts(MethodFacts):
    """Facts of :class:`sgp.methods.lora.LoRA`."""

    name = "lora"
    description = "low-rank adapters of PEFT, trained on one task after another"
    Settings = LoRASettings
    supervised_only = True
    packages = ("peft",)
