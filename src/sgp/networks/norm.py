"""Statistics by which BatchNorm normalizes."""

from typing import Literal

Statistics = Literal["batch", "stored"]
"""Statistics in eval mode: those of the mini-batch, so that an image's logits depend on the rest of the batch; or
running averages."""


def tracks_running_stats(statistics: Statistics) -> bool:
    """Return whether BatchNorm stores running averages."""
    if statistics not in ("batch", "stored"):
        raise ValueError(f"statistics must be 'batch' or 'stored', got {statistics!r}")
    return statistics == "stored"
