"""Finetuning: one task after another with nothing done about forgetting, the floor of every comparison."""

from __future__ import annotations

from sgp.methods.method import Method, NoSettings
from sgp.methods.settings.finetune import FinetuneFacts


class Finetune(FinetuneFacts, Method[NoSettings]):
    """Does nothing."""
