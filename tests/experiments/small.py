"""Runs that are small enough for tests, and what must be the same in two of them."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sgp.benchmarks import BENCHMARKS
from sgp.benchmarks.stream import Stream
from sgp.experiments.callbacks import Callback
from sgp.experiments.config import Config, configure
from sgp.experiments.folder import RunFolder
from sgp.experiments.supervised import SupervisedTrainer

# A file for `sgp run --import`: images of noise for a real convolutional network, with BatchNorm or without.
NOISE = '''
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from sgp.benchmarks import BENCHMARKS, Benchmark
from sgp.benchmarks.stream import Examples, Stream, Task


@dataclass(frozen=True)
class Noise:
    """Images of noise, brighter by class."""

    tasks: int = 2
    """How many."""
    colour: Literal["grey", "rgb"] = "rgb"
    """Color of the noise."""


def stream(settings: Noise, data: Path | None, seed: int) -> Stream:
    def part(index: int, use: int, count: int) -> Examples:
        generator = torch.Generator().manual_seed(1000 * index + use)
        labels = torch.arange(count) % 2
        noise = torch.randn(count, 3, 32, 32, generator=generator)
        return Examples(noise + labels.view(-1, 1, 1, 1), labels)

    def make(index: int) -> Task:
        return Task(f"noise {index}", index, part(index, 0, 40), part(index, 1, 10), part(index, 2, 10))

    return Stream([f"noise {index}" for index in range(settings.tasks)], (3, 32, 32), [2] * settings.tasks, make)


BENCHMARKS.add(
    "noise",
    Benchmark(
        name="noise",
        description="Images of noise.",
        settings=Noise,
        stream=stream,
        network="lenet",
        datasets=(),
    ),
)
'''


def small(method: str = "sgp", **settings: Any) -> Config[Any]:
    """Three split digits tasks in two epochs, with every phase of a run."""
    given: dict[str, Any] = {"kind": "split", "tasks": 3, "epochs": 2, "threads": torch.get_num_threads()}
    return configure("digits", method, **(given | settings))


def stream_of(config: Config[Any]) -> Stream:
    return BENCHMARKS[config.benchmark].stream(config.benchmark_settings, None, config.seed)


def run(
    path: Path, config: Config[Any], *callbacks: Callback, stream: Stream | None = None, resume: bool = False
) -> SupervisedTrainer:
    """Run a config to its end in a folder."""
    with RunFolder.begin(path, config, resume=resume) as folder:
        learner = SupervisedTrainer(config, stream or stream_of(config), folder, *callbacks)
        learner.run()
    return learner


class Stop(Exception):  # noqa: N818 (nothing is wrong)
    """Ends a run from outside."""


def run_with_stops(path: Path, config: Config[Any], *stops: tuple[int, int]) -> SupervisedTrainer:
    """Run a config that is stopped at some epochs (task, epoch), before their checkpoint, and taken up after each."""
    for number, where in enumerate(stops):

        def stop(event: str, values: dict[str, Any], where: tuple[int, int] = where) -> None:
            if event == "epoch" and (values["task"], values["epoch"]) == where:
                raise Stop

        with pytest.raises(Stop):
            run(path, config, stop, resume=number > 0)
    return run(path, config, resume=True)


def events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a run without times."""
    lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "seconds"} for line in lines]


def trace(path: Path) -> dict[str, Any]:
    """Return everything of a run that a second one must repeat to the bit, which is all but times.

    The parts' names are digests of their contents.
    """
    tables = sorted(file for file in path.glob("*.csv") if file.name != "timing.csv")
    return {
        "events": events(path),
        **{file.name: file.read_bytes() for file in tables},
        "checkpoint": json.loads((path / "checkpoint.json").read_text(encoding="utf-8")),
        "parts": sorted(file.name for file in (path / "checkpoint").iterdir()),
    }


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def of_kind(found: Sequence[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [entry for entry in found if entry["event"] == event]


def in_this_process(arguments: list[str]) -> None:
    """Run the command in a process that was forked for it, with nothing on the terminal."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    from sgp.cli import main

    sys.exit(main(arguments))


def run_until_killed(lines: int, operations: int, folder: str, arguments: list[str]) -> None:
    """Run the command in a process that kills itself right before it changes the run's files.

    The disk changes only by such operations, so a kill between two of them leaves what a kill before the second one
    leaves. The moment is counted in operations, so it does not depend on the clock.

    Args:
        lines: Number of lines that the metrics must have before operations are counted.
        operations: Operation to be killed at, counted from 1.
        folder: Folder of the run.
        arguments: Arguments of the command.
    """
    metrics = os.path.join(folder, "metrics.jsonl")
    remaining, watching = operations, True

    def watch(event: str, values: tuple[Any, ...]) -> None:
        nonlocal remaining, watching
        if not watching or event not in ("open", "os.rename", "os.remove", "os.mkdir"):
            return
        is_read = event == "open" and not values[2] & (os.O_WRONLY | os.O_RDWR)
        if is_read or not isinstance(values[0], str | os.PathLike) or not os.fspath(values[0]).startswith(folder):
            return
        watching = False  # not while the metrics are read
        written = Path(metrics).read_bytes().count(b"\n") if os.path.exists(metrics) else 0
        watching = True
        remaining -= written >= lines
        if remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    in_this_process(arguments)
