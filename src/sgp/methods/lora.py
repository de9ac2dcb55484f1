"""LoRA (Hu et al., ICLR 2022) of PEFT, one adapter for all tasks, trained on one after another: W + (s / r) B A."""

from __future__ import annotations

from typing import Any

from torch import nn

from sgp.methods.adapters import Adapters
from sgp.methods.settings.lora import LoRAFacts, LoRASettings


class LoRA(LoRAFacts, Adapters[LoRASettings]):
    """A change of low rank beside each weight."""

    layers = (nn.Linear, nn.Conv2d)

    def _config(self) -> Any:
        settings = self.settings
        return self._peft.LoraConfig(r=settings.lora_rank, lora_alpha=settings.lora_scale, target_modules=self.targets)
