"""Outcome of a run, read from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sgp.experiments.folder import RunError, RunFolder


def read_outcome(path: Path) -> dict[str, Any] | None:
    """Read the last event of a finished run; that of a run on games also has the accumulated reward.

    Returns:
        Values of the event, or None if the run is not finished.
    """
    try:
        events = RunFolder(path).read_events()
    except RunError:  # damaged: `sgp run` says what to do, and other runs need not wait for it
        return None
    if not events or events[-1]["event"] != "end":
        return None
    rewards = [event["accumulated"] for event in events if event["event"] == "game"]
    return events[-1] | ({"reward": rewards[-1]} if rewards else {})
