"""Settings and facts of hat."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sgp.methods.facts import MethodFacts
from sgp.settings import Settings, setting


@dataclass(frozen=True)
class HATSettings(Settings):
    """Settings of HAT."""

    smax: float = setting(400.0, low=1)
    """Slope of the masks at test time and at the end of each epoch; each epoch begins at 1/smax."""
    sparsity: float = setting(0.75, low=0)
    """Weight c of the loss for units that no earlier task uses: larger leaves more for later tasks."""
    test_masks: Literal["soft", "hard"] = "soft"
    """Masks of tests and gates: sigmoid(smax e) as published, or that rounded to 0 and 1, which forgets nothing."""
    embedding_limit: float = setting(6.0, above=0, high=math.inf)
    """Largest absolute value of embeddings."""
    cosh_limit: float = setting(50.0, above=0, high=math.inf)
    """Largest absolute value of s e in the compensation of the embeddings' gradient."""
    clip_norm: float = setting(10000.0, above=0, high=math.inf)
    """Largest norm of the gradient of all parameters."""


class HATFacts(MethodFacts):
    """Facts of :class:`sgp.methods.hat.HAT`."""

    name = "hat"
    description = "hard attention: each task learns which units it uses, and these are closed to later tasks"
    Settings = HATSettings
    supervised_only = True
