"""Finetuning: one task after another with nothing done about forgetting, the floor of every comparison."""

from __future__ import annotations

from sgp.methods.method import Method, NoSettings


class Finetune(Method[NoSettings]):
    """Does nothing."""

    name = "finetune"
    description = "plain training of one task after another: the floor"
    Settings = NoSettings
