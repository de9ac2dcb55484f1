"""What a run has come to, made from its metrics: accuracy, time, memory and what is left of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgp.experiments.config import Config
from sgp.experiments.folder import RunFolder


def accuracy_matrix(rows: Sequence[Sequence[float]]) -> Tensor:
    """R of the metrics, in percent: [T, T] float64, 0 for tasks not yet learned. rows: after each task, all so far.

    Raises:
        ValueError: a row is of more tasks than there are.
    """
    matrix = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for position, row in enumerate(rows):
        if len(row) > len(rows):
            raise ValueError(f"after task {position + 1} there are {len(row)} accuracies, of {len(rows)} tasks")
        matrix[position, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return matrix


def seconds_by_phase(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Wall time of each phase of some events."""
    total: dict[str, float] = {}
    for event in events:
        for phase, seconds in event.get("seconds", {}).items():
            total[phase] = total.get(phase, 0.0) + seconds
    return total


def write_tables(folder: RunFolder) -> None:
    """Write the CSV files of a run. What a resumed run must repeat to the bit is in accuracy.csv and capacity.csv."""
    events = folder.metrics()
    tasks = [event for event in events if event["event"] == "task"]
    header = ["after task", *(task["name"] for task in tasks)]
    folder.table("accuracy.csv", header, [[task["name"], *task["accuracies"]] for task in tasks])
    folder.table(
        "capacity.csv",
        ["after task", "layer", "free"],
        [[task["name"], layer, free] for task in tasks for layer, free in task["free"].items()],
    )
    folder.table(
        "memory.csv",
        ["after task", "what for", "bytes"],
        [[task["name"], use, count] for task in tasks for use, count in task["bytes"].items()],
    )
    timing = []
    for task in tasks:
        own = [event for event in events if event.get("task") == task["task"]]
        timing += [[task["name"], phase, round(seconds, 3)] for phase, seconds in seconds_by_phase(own).items()]
    folder.table("timing.csv", ["task", "phase", "seconds"], timing)


@dataclass(frozen=True)
class Summary:
    """What a run has come to, finished or not.

    Attributes:
        config: of the run.
        names: of the tasks learned so far.
        accuracies: R of the metrics over those tasks, in percent; [T, T].
        finished: whether all tasks of the run have been learned.
        seconds: wall time by phase.
        bytes: memory by what it is for, after the last task.
        free: share of each layer that later tasks may still use, after the last task.
        capacity: parameters that inference uses, in percent of the network's.
    """

    config: Config
    names: list[str]
    accuracies: Tensor
    finished: bool
    seconds: dict[str, float]
    bytes: dict[str, int]
    free: dict[str, float]
    capacity: float


def summary_of(folder: RunFolder) -> Summary:
    """What the folder of a supervised run tells."""
    config, events = folder.config(), folder.metrics()
    assert isinstance(config, Config)
    tasks = [event for event in events if event["event"] == "task"]
    last: dict[str, Any] = tasks[-1] if tasks else {"bytes": {}, "free": {}, "capacity": 100.0}
    return Summary(
        config=config,
        names=[task["name"] for task in tasks],
        accuracies=accuracy_matrix([task["accuracies"] for task in tasks]),
        finished=bool(events) and events[-1]["event"] == "end",
        seconds=seconds_by_phase(events),
        bytes=last["bytes"],
        free=last["free"],
        capacity=last["capacity"],
    )
