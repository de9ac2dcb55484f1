"""Settings of ``sgp demo``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from sgp.settings import Settings, setting


@dataclass(frozen=True)
class DemoSettings(Settings):
    """Compare finetuning, GPM and SGP on permuted digits, one task after another.

    All tasks share one head, which is protected like the other layers. At the lower of the two thresholds the memory
    has room for all tasks, and GPM and SGP are about level; the higher one fills it, which is where they differ. The
    defaults were chosen on other seeds than those that are shown.
    """

    seeds: int = setting(3, low=1)
    """Number of runs of each method, each with new weights and new pixel orders."""
    tasks: int = setting(10, low=2)
    """Number of tasks."""
    epochs: int = setting(5, low=1)
    """Passes over each task's training images."""
    alpha: float = setting(1.0, low=0, high=math.inf)
    """Scale coefficient of SGP: larger values protect more, and inf makes SGP equal to GPM."""
    threshold: float | None = setting(None, above=0, high=1)
    """Share of each layer's input energy that the memory retains: larger values protect more and fill it sooner. By
    default both 0.95 and 0.985."""
    out: Path = Path("sgp-demo")
    """Folder for the runs and the page. If it exists, a number is appended: sgp-demo-2."""

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Thresholds to compare the methods at."""
        return (0.95, 0.985) if self.threshold is None else (self.threshold,)
