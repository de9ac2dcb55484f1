"""Collect the finished runs of a report from folders, and the reasons for what is left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from sgp.benchmarks.metrics import acc, bwt
from sgp.experiments.config import Config, as_command
from sgp.experiments.folder import CONFIG, RunError, RunFolder
from sgp.experiments.record import TECHNICAL, Record
from sgp.experiments.summary import build_accuracy_matrix, sum_seconds
from sgp.report.words import format_count, remove_control_characters


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        path: Folder of the run, as it was given.
        config: Config of the run.
        events: Metrics of the run.
    """

    path: Path
    config: Config[Any]
    events: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """Name of the folder."""
        return remove_control_characters(self.path.name)

    @cached_property
    def command(self) -> str:
        """Command that makes the same run."""
        return remove_control_characters(as_command(self.config))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings by name, as on the command line."""
        return self.config.flat()

    @property
    def is_game(self) -> bool:
        """Whether the tasks are games, which have scores and no accuracies."""
        return self.config.is_game

    @cached_property
    def tasks(self) -> list[dict[str, Any]]:
        """Event of each task or game that was learned."""
        return [event for event in self.events if event["event"] == ("game" if self.is_game else "task")]

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """Events of a run on games with scores on all games so far, at intervals over the whole run."""
        return [event for event in self.events if event["event"] in ("evaluation", "game")]

    @cached_property
    def names(self) -> list[str]:
        """Names of the tasks."""
        return [remove_control_characters(task["name"]) for task in self.tasks]

    @cached_property
    def accuracies(self) -> Tensor:
        """R of the metrics in percent, [T, T]."""
        return build_accuracy_matrix([task["accuracies"] for task in self.tasks])

    @property
    def acc(self) -> float:
        """Average accuracy in percent."""
        return acc(self.accuracies)

    @property
    def bwt(self) -> float | None:
        """Backward transfer in points of accuracy; None after a single task."""
        return bwt(self.accuracies) if len(self.accuracies) > 1 else None

    @cached_property
    def seconds(self) -> float:
        """Wall time of the whole run."""
        return sum(sum_seconds(self.events).values())

    @cached_property
    def extra_bytes(self) -> int:
        """Bytes that are stored beside the network after the last task."""
        return sum(count for use, count in self.tasks[-1]["bytes"].items() if use != "network")

    @property
    def capacity(self) -> float:
        """Parameters that inference uses, in percent of one network."""
        return float(self.tasks[-1]["capacity"])

    @cached_property
    def record(self) -> Record:
        """Record of the run, to be compared with the paper's tables."""
        rows = [task["accuracies"] for task in self.tasks]
        return Record(self.path, self.settings, rows, self.capacity, self.seconds)


@dataclass(frozen=True)
class LeftOut:
    """A folder that is not in the report.

    Attributes:
        path: Path of the folder.
        reason: Why it is not in the report.
    """

    path: Path
    reason: str


@dataclass(frozen=True)
class Collection:
    """Runs that were found in folders.

    Attributes:
        runs: Finished runs.
        left_out: Folders that are not among them.
    """

    runs: list[Run]
    left_out: list[LeftOut]


def collect_runs(paths: Iterable[Path]) -> Collection:
    """Collect the finished runs in some folders.

    Args:
        paths: Folders of runs, or folders with runs somewhere inside.

    Returns:
        The runs, each once, and what was left out.
    """
    runs: dict[tuple[tuple[str, str], ...], Run] = {}
    left_out: list[LeftOut] = []
    seen: set[Path] = set()
    for path in paths:
        found = list(_find_folders(path))
        if not found:
            left_out.append(LeftOut(path, "there is no run in it" if path.is_dir() else "there is no such folder"))
        for folder in found:
            if folder.resolve() in seen:
                continue
            seen.add(folder.resolve())
            try:
                run = _read_run(folder)
            except (RunError, OSError) as error:
                left_out.append(LeftOut(folder, remove_control_characters(str(error))))
            except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                cause = f"{type(error).__name__}: {remove_control_characters(str(error))}"
                left_out.append(LeftOut(folder, f"its metrics are damaged ({cause})"))
            else:
                values = run.settings.items()
                identity = tuple((name, repr(value)) for name, value in values if name not in TECHNICAL)
                twin = runs.setdefault(identity, run)
                if twin is not run:
                    other = remove_control_characters(str(twin.path))
                    left_out.append(LeftOut(folder, f"the same run as {other}, which is counted"))
    return Collection(list(runs.values()), left_out)


def _find_folders(path: Path) -> Iterator[Path]:
    if (path / CONFIG).is_file():
        yield path
    elif path.is_dir():
        yield from sorted(file.parent for file in path.rglob(CONFIG))


def _read_run(path: Path) -> Run:
    """Return a finished run.

    Raises:
        RunError: The run is not finished, or its folder cannot be read.
        ValueError: Its metrics are damaged.
    """
    folder = RunFolder(path)
    run = Run(path, folder.read_config(), folder.read_events())
    total = len(run.tasks)
    if not run.events or run.events[-1]["event"] != "end" or not total:
        done = f"{format_count(total, 'task')} learned so far" if total else "no task learned yet"
        raise RunError(f"not finished: {done}; resume it with `sgp run {path} --resume`")
    # Everything that a report needs is computed here, so that a damaged run is found before anything is drawn.
    _ = run.names, run.seconds, run.extra_bytes, run.capacity, run.command
    if [task["task"] for task in run.tasks] != list(range(total)):
        raise ValueError("the line of a task is missing")
    if run.is_game:
        _ = [(each["step"], each["normalised"], each["accumulated"]) for each in run.evaluations]
        if any(len(each["scores"]) != each["task"] + 1 for each in run.evaluations):
            raise ValueError("a score is missing")
    elif not run.accuracies.isfinite().all():
        raise ValueError("an accuracy is not finite")
    return run
