"""Multitask: all tasks learned at once in one network, the oracle that other methods are held against."""

from __future__ import annotations

from sgp.methods.method import Method, NoSettings
from sgp.methods.settings.multitask import MultitaskFacts


class Multitask(MultitaskFacts, Method[NoSettings]):
    """Plain training on all tasks in random turns: the mean loss of a batch, through the head of its task.

    A batch has examples of one task only. So BatchNorm meets in training what it meets at test, where a batch is of one
    task too.
    """
