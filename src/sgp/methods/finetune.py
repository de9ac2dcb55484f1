"""Finetuning: train on one task after another and do nothing about forgetting, the floor of every comparison."""

from __future__ import annotations

from sgp.methods.method import Method, NoSettings


class Finetune(Method[NoSettings]):
    """Method that changes nothing about training."""

    name = "finetune"
    description = "plain training of one task after another: the floor"
