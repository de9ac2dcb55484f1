"""Learn many tasks in one process, and check that its memory, file handles and objects do not grow."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from experiments.small import run as run_config
from torch import Tensor, nn
from torch.nn import functional as F

import sgp
from sgp.experiments.config import configure

# Python and torch create some hundred objects in the first 30 tasks, which are no leak.
TASKS, QUICK = 100, 60
WIDTH, CLASSES, BATCHES, BATCH = 64, 4, 8, 32
# Growth in the second half of the tasks that is not a leak: noise of the allocator in MiB, and Python objects per task,
# such as the row of accuracies that a run keeps. A leaked optimizer or hook would add dozens of objects per task.
MARGIN, OBJECTS_PER_TASK = 4.0, 5


@dataclass(frozen=True)
class Usage:
    """Memory, file handles and objects of a process at one time.

    Attributes:
        resident: Resident memory in MiB.
        handles: Number of open file handles.
        objects: Number of objects that Python's garbage collector tracks.
    """

    resident: float
    handles: int
    objects: int


def run(folder: Path, *, quick: bool, seed: int) -> dict[str, Any]:
    """Learn many tasks in a plain training loop, and as many with the trainer of `sgp run`.

    Args:
        folder: Empty folder.
        quick: Whether to learn fewer tasks.
        seed: Seed of the tasks and weights.

    Returns:
        Figures of the campaign.
    """
    tasks = QUICK if quick else TASKS
    loops = {"loop": learn_in_loop(folder, tasks, seed), "trainer": learn_in_trainer(folder / "run", tasks, seed)}
    faults = [f"{name}: {fault}" for name, pair in loops.items() for fault in find_growth(*pair, tasks - tasks // 2)]
    figures = {name: {"at half": asdict(first), "at the end": asdict(last)} for name, (first, last) in loops.items()}
    return {"tasks": tasks, **figures, "faults": faults}


def find_growth(first: Usage, last: Usage, tasks: int) -> Iterator[str]:
    """Yield each measure that grew over some tasks.

    Args:
        first: Usage before the tasks.
        last: Usage after them.
        tasks: Number of the tasks.
    """
    for measure, margin in (("resident", MARGIN), ("handles", 0), ("objects", OBJECTS_PER_TASK * tasks)):
        before, after = getattr(first, measure), getattr(last, measure)
        if after > before + margin:
            yield f"{measure} grew from {before} to {after} in {tasks} tasks"


def learn_in_loop(folder: Path, tasks: int, seed: int) -> tuple[Usage, Usage]:
    """Learn tasks with one memory, and return the usage after half of them and after the last one."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    memory = sgp.GradientMemory(model, threshold=0.9, alpha=5)
    first = None
    for task in range(tasks):
        batches = _make_batches(seed + task)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        memory.attach(optimizer)
        for inputs, labels in batches:
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="nearly all of the capacity is blocked", category=UserWarning)
            memory.update(batches)
        memory.check(batches[0])
        memory.save(folder / "memory.safetensors")
        memory.load(folder / "memory.safetensors")
        if task == tasks // 2 - 1:
            first = measure_usage()
    assert first is not None
    return first, measure_usage()


def _make_batches(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of a task whose inputs span four dimensions, which differ between tasks."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(4, WIDTH, generator=generator)
    inputs = torch.randn(BATCHES * BATCH, 4, generator=generator) @ mixing
    labels = torch.randint(CLASSES, (len(inputs),), generator=generator)
    return list(zip(torch.split(inputs, BATCH), torch.split(labels, BATCH), strict=True))


def learn_in_trainer(folder: Path, tasks: int, seed: int) -> tuple[Usage, Usage]:
    """Learn permuted digits as `sgp run` does, and return the usage after half of the tasks and after the last one."""
    usages: list[Usage] = []

    def observe(event: str, values: dict[str, Any]) -> None:
        if event == "task" and values["task"] in (tasks // 2 - 1, tasks - 1):
            usages.append(measure_usage())

    config = configure("digits", "sgp", tasks=tasks, epochs=1, seed=seed, threads=1)
    run_config(folder, config, observe)
    first, last = usages
    return first, last


def measure_usage() -> Usage:
    """Measure the current usage of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    handles = len(list(Path("/proc/self/fd").iterdir())) - 1  # without the handle that lists them
    return Usage(round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1), handles, len(gc.get_objects()))
