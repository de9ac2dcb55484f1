"""Settings and facts of ewc."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sgp.methods.facts import MethodFacts
from sgp.settings import Settings, setting


@dataclass(frozen=True)
class EWCSettings(Settings):
    """The penalty of EWC and how its Fisher information is found."""

    strength: float = setting(5000.0, low=0)
    """Lambda of the penalty lambda / 2 sum F (theta - theta*)^2."""
    fisher: Literal["sample", "batch"] = "sample"
    """Square the gradient of each example, or of each batch as in the published code. The batch form is smaller, by up
    to fisher_batch times."""
    fisher_labels: Literal["true", "drawn"] = "true"
    """Of the data, or drawn from the network's own answer."""
    fisher_batch: int = setting(64, low=1)
    """How many examples run through the network at once for it."""
    fisher_mode: Literal["eval", "train"] = "eval"
    """Of the network meanwhile; train has dropout on, as published."""
    merge: Literal["separate", "online", "mean"] = "separate"
    """separate: each task has its Fisher information and its anchor. online: Fisher informations are added up, and the
    anchor is the last task's. mean: as online, with their mean over tasks, as published."""
    decay: float = setting(1.0, low=0, high=1)
    """online: what the sum is multiplied by at each task before the new one is added."""

    penalty_step: Literal["implicit", "explicit"] = "implicit"
    """implicit: steps have the penalty's gradient at their end, which is stable at any strength. explicit: at their
    start, as usual."""
    clip_norm: float = setting(math.inf, above=0, high=math.inf)
    """Largest norm of the gradient of all parameters, penalty included; inf does not clip. The published code
    has 100, which keeps explicit steps finite."""


class EWCFacts(MethodFacts):
    """Facts of :class:`sgp.methods.ewc.EWC`."""

    name = "ewc"
    description = "elastic weight consolidation: a penalty on change, weighted by Fisher information"
    Settings = EWCSettings
