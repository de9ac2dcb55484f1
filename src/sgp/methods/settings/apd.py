"""Settings and facts of apd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.methods.facts import MethodFacts
from sgp.settings import Settings, setting


@dataclass(frozen=True)
class APDSettings(Settings):
    """The decomposition of APD."""

    l1: float = setting(6e-4, low=0)
    """Weight of |tau|_1; inference takes elements of tau up to this for 0."""
    weight_decay: float = setting(1e-4, low=0)
    """Weight of the squares of tau and m of the task that is learned, and of sigma in the first task."""
    approx: float = setting(100.0, above=0)
    """Weight that holds the weights of earlier tasks where they were."""
    tau_start: Literal["zero", "shared"] = "zero"
    """tau of a new task: 0, or a copy of sigma as published."""
    mask_start: float = setting(3.0)
    """Mean of m of a new task; 0 as published, where tau makes up for the half that the mask takes."""
    penalty: Literal["proximal", "subgradient"] = "proximal"
    """How |tau|_1 is descended: tau shrinks towards 0 after each step and stays there, or by its sign in the gradient,
    which gives no zeros but small numbers."""
    lr_decay: float = setting(1.0, above=0, high=1)
    """What the learning rate is multiplied by after each epoch, beside the schedule."""
    group_every: int = setting(5, low=0)
    """After so many tasks each, those that are alike get a part in common; 0 never."""
    group_centroids: int = setting(2, low=1)
    """How many groups there may be for every so many tasks."""
    group_gap: float = setting(0.01, low=0)
    """In a group an element whose values are no further apart than this becomes a common one."""


class APDFacts(MethodFacts):
    """Facts of :class:`sgp.methods.apd.APD`."""

    name = "apd"
    description = "additive decomposition: shared weights under a mask of the task, plus a sparse part of the task"
    Settings = APDSettings
    supervised_only = True
