"""Settings that methods with replay share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.settings import Settings, setting


@dataclass(frozen=True)
class ReplaySettings(Settings):
    """The memory of a method that keeps examples."""

    # A single example cannot be normalized by BatchNorm.
    memory_size: int = setting(2000, low=2)
    """The most examples that are kept, of all tasks together."""
    memory_batch: int | None = setting(None, low=2)
    """How many of them are drawn for a training step; none: as many as the step has of its own."""
    fill: Literal["first-epoch", "every-epoch"] = "first-epoch"
    """When a task's examples are offered to the memory: in its first epoch, so each once, or in every epoch again."""
