"""Results of a supervised run, computed from its metrics: accuracy, time, memory and free capacity of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sgp.experiments.config import Config
from sgp.experiments.folder import RunFolder


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
    """Write the CSV files of a run. A resumed run repeats accuracy.csv and capacity.csv to the bit."""
    events = folder.read_events()
    tasks = [event for event in events if event["event"] == "task"]
    header = ["after task", *(task["name"] for task in tasks)]
    folder.write_table("accuracy.csv", header, [[task["name"], *task["accuracies"]] for task in tasks])
    write_resource_tables(folder, events, tasks, "task")


def write_resource_tables(
    folder: RunFolder, events: Sequence[dict[str, Any]], tasks: Sequence[dict[str, Any]], unit: str
) -> None:
    """Write what each task has used: free capacity, memory and time.

    Args:
        folder: Folder of the run.
        events: All events of the run.
        tasks: Events that end a task.
        unit: What a task is called in the headers: "task" or "game".
    """
    capacity = [[task["name"], layer, free] for task in tasks for layer, free in task["free"].items()]
    folder.write_table("capacity.csv", [f"after {unit}", "layer", "free"], capacity)
    memory = [[task["name"], use, count] for task in tasks for use, count in task["bytes"].items()]
    folder.write_table("memory.csv", [f"after {unit}", "what for", "bytes"], memory)
    timing = []
    for task in tasks:
        own = [event for event in events if event.get("task") == task["task"]]
        timing += [[task["name"], phase, round(seconds, 3)] for phase, seconds in sum_seconds(own).items()]
    folder.write_table("timing.csv", [unit, "phase", "seconds"], timing)


@dataclass(frozen=True)
class Summary:
    """Results of a supervised run, finished or not.

    Attributes:
        config: Config of the run.
        names: Names of the tasks learned so far.
        accuracies: Accuracy matrix R over these tasks in percent, [T, T].
        finished: Whether all tasks of the run have been learned.
        seconds: Wall time by phase.
        bytes: Memory by what it is for, after the last task.
        free: Share of each layer that later tasks may still use, after the last task.
        capacity: Parameters that inference uses, in percent of the network's.
    """

    config: Config
    names: list[str]
    accuracies: Tensor
    finished: bool
    seconds: dict[str, float]
    bytes: dict[str, int]
    free: dict[str, float]
    capacity: float


def read_summary(folder: RunFolder) -> Summary:
    """Read the results of a supervised run from its folder."""
    config, events = folder.read_config(), folder.read_events()
    assert isinstance(config, Config)
    tasks = [event for event in events if event["event"] == "task"]
    last: dict[str, Any] = tasks[-1] if tasks else {"bytes": {}, "free": {}, "capacity": 100.0}
    return Summary(
        config=config,
        names=[task["name"] for task in tasks],
        accuracies=build_accuracy_matrix([task["accuracies"] for task in tasks]),
        finished=bool(events) and events[-1]["event"] == "end",
        seconds=sum_seconds(events),
        bytes=last["bytes"],
        free=last["free"],
        capacity=last["capacity"],
    )
