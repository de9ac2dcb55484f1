"""Settings and facts of apd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.methods.facts import MethodFacts
from sgp.settings import Settings, setting


@dataclass(frozen=True)
class APDSettings(Settings):
    """Settings of APD."""

    l1: float = setting(6e-4, low=0)
    """Weight of |tau|_1; inference takes elements of tau up to this for 0."""
    weight_decay: float = setting(1e-4, low=0)
    """Weight of the squares of the current task's tau and m, and in the first task of sigma."""
    approx: float = setting(100.0, above=0)
    """Weight of the penalty that keeps the weights of earlier tasks where they were."""
    tau_start: Literal["zero", "shared"] = "zero"
    """tau of a new task: 0, or a copy of sigma as in the published code."""
    mask_start: float = setting(3.0)
    """Mean of m of a new task; 0 in the published code, where tau makes up for the half that the mask takes."""
    penalty: Literal["proximal", "subgradient"] = "proximal"
    """How |tau|_1 is reduced. proximal: tau shrinks towards 0 after each step and stays there. subgradient: by the sign
    of tau in the gradient, which gives small numbers instead of zeros."""
    lr_decay: float = setting(1.0, above=0, high=1)
    """Factor of the learning rate after each epoch, beside the schedule."""
    group_every: int = setting(5, low=0)
    """Number of tasks after which similar ones get a common part, again and again; 0 never."""
    group_centroids: int = setting(2, low=1)
    """Largest number of groups for every group_every tasks."""
    group_gap: float = setting(0.01, low=0)
    """Largest difference of an element's values in a group for which it becomes a common element."""


class APDFacts(MethodFacts):
    """Facts of :class:`sgp.methods.apd.APD`."""

    name = "apd"
    description = "additive decomposition: shared weights under a mask of the task, plus a sparse part of the task"
    Settings = APDSettings
    supervised_only = True
