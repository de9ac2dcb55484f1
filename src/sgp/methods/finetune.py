"""Finetuning: train on one task after another and do nothing about forgetting, the lower bound of every comparison."""

from __future__ import annotations

from sgp.methods.method import Method, NoSettings
from sgp.methods.settings import FinetuneFacts


class Finetune(FinetuneFacts, Method[NoSettings]):
    """Method that changes nothing about training."""
