"""The runs of a report: what is found in folders, and what had to be left out and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from sgp.benchmarks.metrics import acc, bwt
from sgp.experiments.config import AnyConfig, GameConfig, as_command
from sgp.experiments.folder import CONFIG, RunError, RunFolder
from sgp.experiments.summary import build_accuracy_matrix, sum_seconds
from sgp.report.words import clean

# Settings that differ between runs of one experiment: what its mean is over, and what changes the last bits at most.
REPEATS = ("seed", "order")
TECHNICAL = ("threads", "channels_last")


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        path: of its folder, as it was given.
        config: of the run.
        events: its metrics.
    """

    path: Path
    config: AnyConfig
    events: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return clean(self.path.name)

    @cached_property
    def command(self) -> str:
        """What makes the same run."""
        return clean(as_command(self.config))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """By name, as on the command line."""
        return self.config.flat()

    @property
    def is_game(self) -> bool:
        """Whether it has learned games, which have scores and no accuracies."""
        return isinstance(self.config, GameConfig)

    @cached_property
    def tasks(self) -> list[dict[str, Any]]:
        """What was written down after each task or game."""
        return [event for event in self.events if event["event"] == ("game" if self.is_game else "task")]

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """Of a run on games: scores on all games so far, at intervals over the whole run."""
        return [event for event in self.events if event["event"] in ("evaluation", "game")]

    @cached_property
    def names(self) -> list[str]:
        return [clean(task["name"]) for task in self.tasks]

    @cached_property
    def accuracies(self) -> Tensor:
        """R of the metrics, in percent. [T, T]"""
        return build_accuracy_matrix([task["accuracies"] for task in self.tasks])

    @property
    def acc(self) -> float:
        return acc(self.accuracies)

    @property
    def bwt(self) -> float | None:
        return bwt(self.accuracies) if len(self.accuracies) > 1 else None

    @cached_property
    def seconds(self) -> float:
        """Wall time of the whole run."""
        return sum(sum_seconds(self.events).values())

    @cached_property
    def extra_bytes(self) -> int:
        """What is kept beside the network after the last task."""
        return sum(count for use, count in self.tasks[-1]["bytes"].items() if use != "network")

    @property
    def capacity(self) -> float:
        """Parameters that inference uses, in percent of the network's."""
        return float(self.tasks[-1]["capacity"])


@dataclass(frozen=True)
class LeftOut:
    """A folder that is not in the report.

    Attributes:
        path: of it.
        reason: why not.
    """

    path: Path
    reason: str


@dataclass(frozen=True)
class Collection:
    """What was found.

    Attributes:
        runs: that are finished.
        left_out: what is not among them.
    """

    runs: list[Run]
    left_out: list[LeftOut]


def collect(paths: Iterable[Path]) -> Collection:
    """The runs in some folders, each of which is a run or has runs somewhere inside."""
    runs: dict[tuple[tuple[str, str], ...], Run] = {}
    left_out: list[LeftOut] = []
    seen: set[Path] = set()
    for path in paths:
        found = list(_folders(path))
        if not found:
            left_out.append(LeftOut(path, "there is no run in it" if path.is_dir() else "there is no such folder"))
        for folder in found:
            if folder.resolve() in seen:
                continue
            seen.add(folder.resolve())
            try:
                run = _read(folder)
            except (RunError, OSError) as error:
                left_out.append(LeftOut(folder, clean(str(error))))
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                left_out.append(
                    LeftOut(folder, f"its metrics are damaged ({type(error).__name__}: {clean(str(error))})")
                )
            else:
                values = run.settings.items()
                identity = tuple((name, repr(value)) for name, value in values if name not in TECHNICAL)
                twin = runs.setdefault(identity, run)
                if twin is not run:
                    left_out.append(LeftOut(folder, f"the same run as {clean(str(twin.path))}, which is counted"))
    return Collection(list(runs.values()), left_out)


def _folders(path: Path) -> Iterator[Path]:
    if (path / CONFIG).is_file():
        yield path
    elif path.is_dir():
        yield from sorted(file.parent for file in path.rglob(CONFIG))


def _read(path: Path) -> Run:
    """A finished run.

    Raises:
        RunError: it is not finished, or its folder cannot be read.
    """
    folder = RunFolder(path)
    run = Run(path, folder.read_config(), folder.read_events())
    total = len(run.tasks)
    if not run.events or run.events[-1]["event"] != "end" or not total:
        done = f"{total} task{'s' * (total != 1)} learned so far" if total else "no task learned yet"
        raise RunError(f"not finished: {done}; `sgp run {path} --resume` goes on with it")
    # All that a report asks for is asked for here, so that a damaged run is found before anything is drawn.
    _ = run.names, run.seconds, run.extra_bytes, run.capacity, run.command
    if [task["task"] for task in run.tasks] != list(range(total)):
        raise ValueError("the line of a task is missing")
    if run.is_game:
        _ = [(each["step"], each["normalised"], each["accumulated"]) for each in run.evaluations]
        if any(len(each["scores"]) != each["task"] + 1 for each in run.evaluations):
            raise ValueError("a score is missing")
    elif not run.accuracies.isfinite().all():
        raise ValueError("an accuracy is no number")
    return run
