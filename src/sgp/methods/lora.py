"""LoRA (Hu et al., ICLR 2022) of PEFT: one adapter W + (s / r) B A for all tasks, trained on one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from sgp.methods.adapters import Adapters


@dataclass(frozen=True)
class LoRASettings:
    """Settings of LoRA."""

    lora_rank: int = 8
    """Rank r of the change of each weight, at least 1."""
    lora_scale: float = 16.0
    """Scale s, above 0; the change is multiplied by s / r."""

    def __post_init__(self) -> None:
        if self.lora_rank < 1:
            raise ValueError(f"lora_rank must be at least 1, got {self.lora_rank}")
        if not 0 < self.lora_scale < float("inf"):
            raise ValueError(f"lora_scale must be above 0 and finite, got {self.lora_scale}")


class LoRA(Adapters[LoRASettings]):
    """Trains a low-rank change of each weight."""

    name = "lora"
    description = "low-rank adapters of PEFT, trained on one task after another"
    Settings = LoRASettings
    layer_types = (nn.Linear, nn.Conv2d)

    def _build_config(self) -> Any:
        settings = self.settings
        return self._peft.LoraConfig(r=settings.lora_rank, lora_alpha=settings.lora_scale, target_modules=self.targets)
