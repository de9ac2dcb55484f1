"""Settings in groups that have one flat list of names, as in files and on the command line."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from sgp.paper import Preset, Recipe

# Fields of a config that are dataclasses of settings themselves.
GROUPS = ("stream", "training", "settings")
# Numpy's generators, which draw validation images and orders of pixels, take no larger one.
MOST_SEED = 2**32 - 1


@dataclass(frozen=True)
class Flat:
    """What the configs of all kinds of runs share.

    Attributes:
        stream: settings of the benchmark, of its own dataclass.
        training: how each task is learned.
        settings: settings of the method, of its own dataclass.
    """

    benchmark: str
    """One of `sgp list benchmarks`."""
    method: str
    """One of `sgp list methods`."""
    preset: Preset = "paper"
    """paper: what the text says; reference: what the published code does; corrected: what is right."""
    recipe: Recipe = "paper"
    """paper: its training; fast, where there is one: a cosine rate and averaged weights in fewer epochs."""
    seed: int = 0
    """Of the weights, the order of batches, dropout, games and everything else that is random."""
    stream: object = None
    training: object = None
    settings: object = None

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= MOST_SEED:
            raise ValueError(f"seed must be from 0 to {MOST_SEED}, got {self.seed}")

    def flat(self) -> dict[str, Any]:
        """Every setting by its name, as on the command line."""
        values: dict[str, Any] = {}
        for group in (self, self.stream, self.training, self.settings):
            for entry in dataclasses.fields(group):  # type: ignore[arg-type]
                if entry.name not in GROUPS:
                    values[entry.name] = getattr(group, entry.name)
        return values
