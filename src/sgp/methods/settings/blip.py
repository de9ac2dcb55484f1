"""Settings and facts of blip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.methods.facts import MethodFacts
from sgp.settings import Settings, setting


@dataclass(frozen=True)
class BLIPSettings(Settings):
    """How many bits a task freezes."""

    # A smaller one could be rounded to 0 in float32.
    fisher_prior: float = setting(5e-12, low=1e-30)
    """The Fisher information of a parameter before any task, for each of its layer's n. Four times
    smaller is a bit more. The published code's are smaller by the square of the batch that it takes gradients of: 5e-16
    at 100 images and 5e-18 at 62 states of games are 5e-12 and 1.92e-14 here."""
    max_bits: int = setting(20, low=1)
    """The most that can be frozen of a parameter."""
    bound: float = setting(6.0, above=0)
    """Weights lie within bound / sqrt(n) of 0. Biases lie within 1."""
    fan: Literal["in", "largest"] = "in"
    """What n of a layer is: its inputs, for each output; or the larger one of inputs and outputs, as published for
    games."""
    unfrozen: Literal["keep", "zero"] = "keep"
    """What a parameter without a frozen bit is after a task: as it was, or 0 as published, where a unit whose weights
    are all 0 never learns again."""
    fisher_labels: Literal["true", "drawn"] = "drawn"
    """Drawn from the network's own answer, which must be logits; or those of the batches."""
    fisher_batch: int = setting(100, low=1)
    """How many examples run through the network at once for the Fisher information."""
    fisher_batches: int = setting(80, low=1)
    """The most batches that it is found from."""


class BLIPFacts(MethodFacts):
    """Facts of :class:`sgp.methods.blip.BLIP`."""

    name = "blip"
    description = "bit-level information preserving: each task freezes the first bits of the weights it uses"
    Settings = BLIPSettings
    rounds_weights = True
