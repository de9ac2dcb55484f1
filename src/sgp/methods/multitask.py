"""Multitask: learn all tasks at once in one network, the upper bound that other methods are compared with."""

from __future__ import annotations

from sgp.methods.method import Method, NoSettings
from sgp.methods.settings import MultitaskFacts


class Multitask(MultitaskFacts, Method[NoSettings]):
    """Plain training on all tasks in random turns, with the mean loss of a batch through the head of its task.

    A batch has examples of one task only. So BatchNorm sees in training what it sees at test time, where a batch is of
    one task too.
    """
