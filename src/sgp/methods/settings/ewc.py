"""Settings and facts of ewc."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sgp.methods.facts import MethodFacts
from sgp.methods.settings.penalty import PenaltySettings
from sgp.settings import setting


@dataclass(frozen=True)
class EWCSettings(PenaltySettings):
    """Penalty of EWC, and how its Fisher information is computed."""

    strength: float = setting(5000.0, low=0)
    """lambda of the penalty lambda / 2 sum F (theta - theta*)^2."""
    fisher: Literal["sample", "batch"] = "sample"
    """Square the gradient of each example, or of each batch as in the published code. The batch form is smaller, by up
    to fisher_batch times."""
    fisher_labels: Literal["true", "drawn"] = "true"
    """true: labels of the data. drawn: labels drawn from the network's own output."""
    fisher_batch: int = setting(64, low=1)
    """Number of examples that run through the network at once for the Fisher information."""
    fisher_mode: Literal["eval", "train"] = "eval"
    """Mode of the network for the Fisher information; train has dropout on, as in the published code."""
    merge: Literal["separate", "online", "mean"] = "separate"
    """separate: each task has its own Fisher information and anchor. online: sum the Fisher information of all tasks,
    and use the last task's anchor. mean: like online, with the mean over tasks, as in the published code."""
    decay: float = setting(1.0, low=0, high=1)
    """Factor of the sum of earlier tasks when a new one is added, for merge=online."""
    clip_norm: float = setting(math.inf, above=0, high=math.inf)
    """Largest norm of the gradient of all parameters, penalty included; inf does not clip. The published code uses 100,
    which keeps explicit steps finite."""


class EWCFacts(MethodFacts):
    """Facts of :class:`sgp.methods.ewc.EWC`."""

    name = "ewc"
    description = "elastic weight consolidation: a penalty on change, weighted by Fisher information"
    Settings = EWCSettings
