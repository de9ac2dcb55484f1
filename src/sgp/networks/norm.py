"""What BatchNorm divides by."""

from typing import Literal

Statistics = Literal["batch", "stored"]
"""In eval mode: the mini-batch, so that an image's logits depend on the images beside it; or running averages."""


def keeps_running(statistics: Statistics) -> bool:
    """Whether BatchNorm keeps running averages, its `track_running_stats`."""
    if statistics not in ("batch", "stored"):
        raise ValueError(f"statistics={statistics!r} is not known: use 'batch' or 'stored'")
    return statistics == "stored"
