"""LoRA (Hu et al., ICLR 2022) of PEFT: one adapter W + (s / r) B A for all tasks, trained on one after another."""

from __future__ import annotations

from typing import Any

from torch import nn

from sgp.methods.adapters import Adapters
from sgp.methods.settings import LoRAFacts, LoRASettings


class LoRA(LoRAFacts, Adapters[LoRASettings]):
    """Trains a low-rank change of each weight."""

    layer_types = (nn.Linear, nn.Conv2d)

    def _build_config(self) -> Any:
        settings = self.settings
        return self._peft.LoraConfig(r=settings.lora_rank, lora_alpha=settings.lora_scale, target_modules=self.targets)
