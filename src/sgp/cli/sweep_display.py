"""Progress display of a sweep, and the table of its results."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sgp.experiments.callbacks import format_duration
from sgp.experiments.config import Config
from sgp.experiments.folder import RunError, RunFolder
from sgp.experiments.jobs import Events, Job
from sgp.experiments.record import REPEATS
from sgp.experiments.summary import read_outcome
from sgp.experiments.sweep import Point
from sgp.report.words import format_spread

# Results of a run by their heading; that of games is the accumulated normalized reward.
COLUMNS = {"acc": "ACC (%)", "bwt": "BWT (%)", "reward": "reward"}


@dataclass(frozen=True)
class _Progress:
    """Progress of a run: the share of its tasks that is learned, and words."""

    share: float = 0.0
    words: str = "starting"


class SweepDisplay:
    """Print when each run ends; at a terminal also show the progress of all runs.

    Use it as a context manager.

    Args:
        console: Console to print to.
        configs: Configs of the runs by their folders.
    """

    def __init__(self, console: Console, configs: dict[Path, Config[Any]]) -> None:
        self.console = console
        self.configs = configs
        # A run that is resumed has less left to do.
        self._before = {folder: _read_progress(folder, config) for folder, config in configs.items()}
        self._running: dict[Path, float] = {}
        self._ended: set[Path] = set()
        self._begun = time.monotonic()
        self._live = Live(get_renderable=self.view, console=console, refresh_per_second=1, transient=True)

    def __enter__(self) -> SweepDisplay:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def follow(self, events: Events) -> Iterator[tuple[Job, int]]:
        """Print each run that starts or ends, and yield the ended ones with their exit status."""
        for job, status in events:
            if status is None:
                self._begin(job.folder)
            else:
                self._end(job.folder, status)
                yield job, status

    def _begin(self, folder: Path) -> None:
        self._running[folder] = time.monotonic()
        if not self.console.is_terminal:
            self._print(folder, "started" if self._before[folder] == _Progress() else "resumed")

    def _end(self, folder: Path, status: int) -> None:
        taken = time.monotonic() - self._running.pop(folder)
        self._ended.add(folder)
        if status:
            self._print(folder, f"failed, {describe_status(status)} ({format_duration(taken)})", "red")
            return
        last = read_outcome(folder) or {}
        score = f"ACC {last['acc']:.2f} %" if last.get("acc") is not None else "finished"
        if last.get("reward") is not None:
            score = f"reward {last['reward']:.2f}"
        self._print(folder, f"{score} ({format_duration(taken)})")

    def _print(self, folder: Path, what: str, style: str = "") -> None:
        line = f"{len(self._ended)}/{len(self.configs)} {folder.name}: {what}"
        # A separate text: the style of a whole print would also colour the live display below it.
        self.console.print(Text(line, style=style), soft_wrap=True)

    def view(self) -> Group:
        """Return the progress of the sweep and of each running run."""
        running = {folder: _read_progress(folder, self.configs[folder]) for folder in list(self._running)}
        whole = len(self.configs) - sum(progress.share for progress in self._before.values())
        done = sum(1 - self._before[folder].share for folder in self._ended)
        done += sum(max(0.0, progress.share - self._before[folder].share) for folder, progress in running.items())
        elapsed = time.monotonic() - self._begun
        heading = f"{len(self._ended)}/{len(self.configs)} runs"
        left = f", about {format_duration(elapsed * (whole - done) / done)} left" if done else ""
        bar = Table.grid(padding=(0, 1))
        bar.add_row(heading, ProgressBar(total=whole, completed=done, width=20), f"{format_duration(elapsed)}{left}")
        lines = Table.grid(padding=(0, 2))
        lines.add_column(no_wrap=True)
        lines.add_column(no_wrap=True, justify="right")
        for folder, progress in running.items():
            lines.add_row(_shorten(folder.name, self.console.width - 24), progress.words)
        return Group(bar, lines)


def _shorten(name: str, width: int) -> Text:
    """Shorten a name to its end, in which the names of a sweep differ."""
    return Text(name if len(name) <= width else "…" + name[1 - width :])


def _read_progress(folder: Path, config: Config[Any]) -> _Progress:
    try:
        events = RunFolder(folder).read_events()
    except RunError:  # the run itself reports it
        return _Progress()
    last = next((event for event in reversed(events) if "task" in event), None)
    if last is None:
        return _Progress()
    learned = sum(event["event"] in ("task", "game") for event in events)
    games = getattr(config.benchmark_settings, "games", None)
    tasks = len(games.split(",")) if games else getattr(config.benchmark_settings, "tasks", None)
    words = f"task {last['task'] + 1}" + (f"/{tasks}" if tasks else "")
    words += "".join(f", {unit} {last[unit]}" for unit in ("epoch", "update") if unit in last)
    return _Progress(learned / tasks if tasks else 0.0, words)


def describe_status(status: int) -> str:
    """Return in words how a process has ended."""
    return f"exit status {status}" if status > 0 else f"killed by signal {-status}"


def print_outcome(console: Console, points: Iterable[tuple[Point, Path]]) -> None:
    """Print the mean results of the finished runs, over runs that differ only in seed or task order."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for point, folder in points:
        last = read_outcome(folder)
        if last:
            rows.setdefault(_build_label(point), []).append(last)
    found = {name for ends in rows.values() for end in ends for name, value in end.items() if value is not None}
    columns = {name: heading for name, heading in COLUMNS.items() if name in found}
    if not columns:
        return
    view = Table(title="mean ± deviation of finished runs", title_justify="left")
    view.add_column("", overflow="fold")
    for heading in ("runs", *columns.values()):
        view.add_column(heading, justify="right", no_wrap=True)
    for label, ends in rows.items():
        values = ([end[name] for end in ends if end.get(name) is not None] for name in columns)
        view.add_row(escape(label), str(len(ends)), *(format_spread(each, 2) if each else "" for each in values))
    console.print(view)


def _build_label(point: Point) -> str:
    chosen = [point.config.benchmark, point.config.method]
    others = [name for name in point.varied if name not in ("benchmark", "method", *REPEATS)]
    return " ".join([*chosen, *(f"{name}={str(point.varied[name]).removesuffix('.0')}" for name in others)])
