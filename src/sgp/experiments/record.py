"""The record of a finished run: its settings, accuracies and times, read from its files without importing torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from sgp.experiments.config import read_recorded

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
# Settings that differ between the runs that a mean is over, and settings that change the last bits at most.
REPEATS = ("seed", "order")
TECHNICAL = ("threads", "channels_last", "device")


class RunError(RuntimeError):
    """Raised when a run cannot start or continue; the message says why and what to do."""


@dataclass(frozen=True)
class Record:
    """A finished supervised run.

    Attributes:
        path: Folder of the run.
        settings: Every setting by its name.
        accuracies: Test accuracies in percent, R[i][j] of task j after task i, for j <= i.
        capacity: Parameters that inference uses, in percent of one network.
        seconds: Wall time of the whole run.
    """

    path: Path
    settings: dict[str, Any]
    accuracies: list[list[float]]
    capacity: float
    seconds: float

    @property
    def acc(self) -> float:
        """Average accuracy after the last task, in percent."""
        return mean(self.accuracies[-1])

    @property
    def bwt(self) -> float | None:
        """Backward transfer in points of accuracy; None after a single task."""
        last = self.accuracies[-1]
        changes = [last[task] - row[task] for task, row in enumerate(self.accuracies[:-1])]
        return mean(changes) if changes else None


def read_record(folder: Path) -> Record:
    """Read the record of a finished run.

    Args:
        folder: Folder of the run.

    Returns:
        The record.

    Raises:
        RunError: The run is not finished, or its files cannot be read; the message does not repeat the folder.
    """
    try:
        settings = read_recorded(folder / CONFIG).flat()
        events = list(iterate_events(folder / METRICS))
        tasks = [event for event in events if event["event"] == "task"]
        if not tasks or events[-1]["event"] != "end":
            raise RunError(f"not finished: {len(tasks)} task{'s' * (len(tasks) != 1)} learned so far")
        return Record(
            folder,
            settings,
            [_read_row(task["accuracies"], number) for number, task in enumerate(tasks, start=1)],
            _read_number(tasks[-1]["capacity"]),
            sum(_read_number(seconds) for event in events for seconds in event.get("seconds", {}).values()),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"cannot be read ({type(error).__name__}: {error})") from error


def _read_row(row: Any, length: int) -> list[float]:
    if not isinstance(row, list) or len(row) != length:
        raise ValueError(f"after task {length} there must be {length} accuracies, got {row!r}")
    return [_read_number(value) for value in row]


def _read_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)


def iterate_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a metrics file. A torn last line is not an event.

    Args:
        path: File to read; a file that does not exist has no events.

    Yields:
        The events in their order.

    Raises:
        RunError: A line is not an event.
    """
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict) or "event" not in event:
            raise RunError(f"{path} is damaged in line {number}")
        yield event
