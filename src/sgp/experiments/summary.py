"""Results of a run, computed from its metrics: accuracies or scores, time, memory and free capacity of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sgp.experiments.config import Config
from sgp.experiments.folder import RunError, RunFolder


def build_accuracy_matrix(rows: Sequence[Sequence[float]]) -> Tensor:
    """Return the accuracy matrix R in percent, [T, T] float64, with 0 for tasks that are not learned yet.

    Args:
        rows: Accuracies of all tasks so far, after each task.

    Raises:
        ValueError: A row has more accuracies than there are tasks.
    """
    matrix = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for position, row in enumerate(rows):
        if len(row) > len(rows):
            raise ValueError(f"after task {position + 1} there are {len(row)} accuracies, of {len(rows)} tasks")
        matrix[position, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return matrix


def sum_seconds(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Sum the wall time of each phase over some events."""
    total: dict[str, float] = {}
    for event in events:
        for phase, seconds in event.get("seconds", {}).items():
            total[phase] = total.get(phase, 0.0) + seconds
    return total


def write_tables(folder: RunFolder) -> None:
    """Write the CSV files of a run. In a resumed run, all but timing.csv and memory.csv are byte-identical."""
    events = folder.read_events()
    tasks = _find_tasks(events)
    names, unit = [task["name"] for task in tasks], tasks[-1]["event"]
    if unit == "game":
        _write_scores(folder, names, events)
    else:
        rows = [[task["name"], *task["accuracies"]] for task in tasks]
        folder.write_table("accuracy.csv", ["after task", *names], rows)
    capacity = [[task["name"], layer, free] for task in tasks for layer, free in task["free"].items()]
    folder.write_table("capacity.csv", [f"after {unit}", "layer", "free"], capacity)
    memory = [[task["name"], use, count] for task in tasks for use, count in task["bytes"].items()]
    folder.write_table("memory.csv", [f"after {unit}", "what for", "bytes"], memory)
    timing = []
    for task in tasks:
        own = [event for event in events if event.get("task") == task["task"]]
        timing += [[task["name"], phase, round(seconds, 3)] for phase, seconds in sum_seconds(own).items()]
    folder.write_table("timing.csv", [unit, "phase", "seconds"], timing)


def _write_scores(folder: RunFolder, names: Sequence[str], events: Sequence[dict[str, Any]]) -> None:
    """Write the evaluations up to the last learned game. The csv module writes None as an empty cell."""
    curve = [
        (event, [event["step"], names[event["task"]]])
        for event in events
        if event["event"] in ("evaluation", "game") and event["task"] < len(names)
    ]
    scores = [
        [*place, *row]
        for event, place in curve
        for row in zip(names, event["scores"], event["normalised"], strict=False)
    ]
    folder.write_table("scores.csv", ["step", "learning", "game", "score", "normalised"], scores)
    rewards = [[*place, event["accumulated"]] for event, place in curve]
    folder.write_table("accumulated.csv", ["step", "learning", "accumulated"], rewards)


def _find_tasks(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] in ("task", "game")]


@dataclass(frozen=True)
class Summary:
    """Results of a run, finished or not.

    Attributes:
        config: Config of the run.
        tasks: Event of each learned task or game.
        seconds: Wall time by phase.
        finished: Whether all tasks of the run have been learned.
    """

    config: Config[Any]
    tasks: list[dict[str, Any]]
    seconds: dict[str, float]
    finished: bool

    @property
    def names(self) -> list[str]:
        """Names of the tasks learned so far."""
        return [task["name"] for task in self.tasks]

    @cached_property
    def accuracies(self) -> Tensor:
        """Accuracy matrix R over the tasks learned so far in percent, [T, T]."""
        return build_accuracy_matrix([task["accuracies"] for task in self.tasks])

    @property
    def last(self) -> dict[str, Any]:
        """Event of the last task, with the free share of each layer, the memory in bytes, and the capacity."""
        return self.tasks[-1] if self.tasks else {"free": {}, "bytes": {}, "capacity": 100.0}

    @property
    def extra_bytes(self) -> int:
        """Memory in addition to the network after the last task, in bytes."""
        return sum(count for use, count in self.last["bytes"].items() if use != "network")


def read_summary(folder: RunFolder) -> Summary:
    """Read the results of a run from its folder."""
    config, events = folder.read_config(), folder.read_events()
    summary = Summary(config, _find_tasks(events), sum_seconds(events), bool(events) and events[-1]["event"] == "end")
    if not config.is_game:
        _ = summary.accuracies  # raises if a line of the metrics is missing
    return summary


def read_outcome(path: Path) -> dict[str, Any] | None:
    """Read the last event of a finished run, for a run on games with the accumulated reward.

    Returns:
        Values of the event, or None if the run is not finished.
    """
    try:
        events = RunFolder(path).read_events()
    except RunError:  # damaged: `sgp run` reports it, and other runs must not fail because of it
        return None
    if not events or events[-1]["event"] != "end":
        return None
    rewards = [event["accumulated"] for event in events if event["event"] == "game"]
    return events[-1] | ({"reward": rewards[-1]} if rewards else {})
