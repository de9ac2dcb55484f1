"""The record of a finished run: its settings, accuracies and times, read from its files without importing torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
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
        RunError: The file cannot be read, or a line is not an event.
    """
    if not path.exists():
        return
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise RunError(f"{path} is damaged in line {number}")
        yield event


def iterate_whole_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a metrics file as `iterate_events` does, with all values that results are computed from.

    Raises:
        RunError: The file cannot be read, a line is not an event, or a value is missing or of another type.
    """
    for number, event in enumerate(iterate_events(path), start=1):
        name = find_damaged_value(event)
        if name is not None:
            raise RunError(f"{path} is damaged in line {number}: {name} is {event.get(name)!r:.80}")
        yield event


def _is_number(value: Any) -> bool:
    """Return whether a value is a number that torch can represent."""
    return not isinstance(value, bool) and (isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63))


def _is_position(value: Any) -> bool:
    return _is_number(value) and isinstance(value, int) and value >= 0


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _are_optional_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(each is None or _is_number(each) for each in value)


def _have_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


_RESOURCES: dict[str, Callable[[Any], bool]] = {
    "name": lambda value: isinstance(value, str),
    "free": _have_numbers,
    "bytes": _have_numbers,
    "capacity": _is_number,
}
_EVALUATION: dict[str, Callable[[Any], bool]] = {
    "task": _is_position,
    "update": _is_position,
    "step": _is_position,
    "scores": _are_numbers,
    "normalised": _are_optional_numbers,
    "accumulated": lambda value: value is None or _is_number(value),
}
# Values of the events that results are computed from, with the form that readers rely on.
FORMS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "task": {"task": _is_position, "accuracies": _are_numbers} | _RESOURCES,
    "evaluation": _EVALUATION,
    "game": _EVALUATION | _RESOURCES,
}


def find_damaged_value(event: dict[str, Any]) -> str | None:
    """Return the name of a value that is missing in an event or has another type; None if there is none."""
    forms = FORMS.get(event["event"], {}) | ({"seconds": _have_numbers} if "seconds" in event else {})
    return next((name for name, has_form in forms.items() if name not in event or not has_form(event[name])), None)
