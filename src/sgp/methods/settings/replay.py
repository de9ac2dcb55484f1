"""Settings that methods with replay share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.settings import Settings, setting


@dataclass(frozen=True)
class ReplaySettings(Settings):
    """Settings of a memory of examples."""

    # A single example cannot be normalized by BatchNorm.
    memory_size: int = setting(2000, low=2)
    """Largest number of stored examples of all tasks together."""
    memory_batch: int | None = setting(None, low=2)
    """Number of stored examples that each training step draws; none: as many as the batch has."""
    fill: Literal["first-epoch", "every-epoch"] = "first-epoch"
    """When a task's examples are offered to the memory: in its first epoch, so each once, or in every epoch again."""

    def is_filled(self, epoch: int) -> bool:
        """Return whether the examples of an epoch are offered to the memory."""
        return self.fill == "every-epoch" or epoch == 0

    def count_draws(self, batch_size: int) -> int:
        """Return the number of stored examples to draw beside a batch."""
        return self.memory_batch or batch_size
