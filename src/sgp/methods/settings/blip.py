"""Settings and facts of blip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.methods.facts import MethodFacts
from sgp.settings import Settings, setting


@dataclass(frozen=True)
class BLIPSettings(Settings):
    """Settings of BLIP."""

    # A smaller one could be rounded to 0 in float32.
    fisher_prior: float = setting(5e-12, low=1e-30)
    """Fisher information of a parameter before any task, for each of its layer's n. Four times smaller is one bit more.
    The published code's are smaller by the square of the batch that it takes gradients of: 5e-16 at 100 images and
    5e-18 at 62 states of games are 5e-12 and 1.92e-14 here."""
    max_bits: int = setting(20, low=1)
    """Largest number of frozen bits of a parameter."""
    bound: float = setting(6.0, above=0)
    """Weights lie within bound / sqrt(n) of 0. Biases lie within 1."""
    fan: Literal["in", "largest"] = "in"
    """n of a layer: its inputs, for each output; or the larger one of inputs and outputs, as published for games."""
    unfrozen: Literal["keep", "zero"] = "keep"
    """Value of a parameter without a frozen bit after a task: as it was, or 0 as published, where a unit whose weights
    are all 0 never learns again."""
    fisher_labels: Literal["true", "drawn"] = "drawn"
    """true: labels of the data. drawn: labels drawn from the network's own output, which must be logits."""
    fisher_batch: int = setting(100, low=1)
    """Number of examples that run through the network at once for the Fisher information."""
    fisher_batches: int = setting(80, low=1)
    """Largest number of batches that the Fisher information is computed from."""


class BLIPFacts(MethodFacts):
    """Facts of :class:`sgp.methods.blip.BLIP`."""

    name = "blip"
    description = "bit-level information preserving: each task freezes the first bits of the weights it uses"
    Settings = BLIPSettings
    rounds_weights = True
