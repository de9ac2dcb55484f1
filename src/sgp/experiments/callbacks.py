"""Callbacks of a run: the progress display, and TensorBoard where it is installed."""

from __future__ import annotations

import threading
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from sgp.experiments.config import Config


class Callback(Protocol):
    """Function that is called for every event of a run, with the values that are written to the metrics."""

    def __call__(self, event: str, values: dict[str, Any]) -> None: ...


class Display:
    """Print the progress of a run and the result of each task: with a bar in a terminal, otherwise in plain lines.

    Use it as a context manager, and pass it to the trainer as a callback.

    Args:
        console: Console to print to.
        config: Config of the run.
        names: Names of the tasks.
    """

    def __init__(self, console: Console, config: Config[Any], names: list[str]) -> None:
        self.console = console
        self.names = names
        self._unit = "game" if config.is_game else "task"
        # Epochs of a task or updates of a game.
        self._total: int = config.trainer.updates if config.is_game else config.trainer.epochs
        self._seen = 0
        self._begun = time.monotonic()
        self._task_seconds: list[float] = []
        self._bar: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal or console.quiet,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        """Print an event of the run."""
        if event in ("epoch", "update"):
            self._seen += 1
        elif event in ("task", "game"):
            self._end_task()
        if event == "epoch":
            self._print_epoch(values)
        elif event == "task":
            self._print_task(values)
        elif event == "update":
            score = "" if values["score"] is None else f"score {values['score']:.1f}, "
            state = f"{score}entropy {values['entropy']:.2f}{self._format_left(values['task'], values['update'])}"
            self._advance(self._name_task(values), values["update"], state)
        elif event in ("evaluation", "game"):
            self._print_evaluation(values)

    def _print_epoch(self, values: dict[str, Any]) -> None:
        heading, epoch, validation = self._name_task(values), values["epoch"], values["validation_accuracy"]
        # A live line has to fit in 80 characters.
        label = "validation" if self._progress.disable else "val"
        accuracy = f"{label} {validation:.1f} %, " if validation is not None else ""
        left = self._format_left(values["task"], epoch)
        state = f"loss {values['train_loss']:.3f}, {accuracy}lr {values['lr']:.2g}{left}"
        if self._progress.disable:
            self._print(f"{heading} epoch {epoch}/{self._total}: {state}")
        self._advance(f"{heading}, epoch {epoch}", epoch, state)

    def _print_task(self, values: dict[str, Any]) -> None:
        row: list[float] = values["accuracies"]
        taken = format_duration(self._task_seconds[-1])
        self._print(
            f"{self._name_task(values)} {values['name']}: {row[-1]:.1f} %; all so far {mean(row):.1f} % ({taken})"
        )

    def _print_evaluation(self, values: dict[str, Any]) -> None:
        scores = ", ".join(f"{name} {score:.1f}" for name, score in zip(self.names, values["scores"], strict=False))
        reward = "" if values["accumulated"] is None else f"; reward {values['accumulated']:.2f}"
        left = self._format_left(values["task"], values["update"])
        heading = f"{self._name_task(values)} after {values['update']}/{self._total} updates"
        self._print(f"{heading}: {scores}{reward}{left}")

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _advance(self, heading: str, done: int, state: str) -> None:
        """Update the live line."""
        if self._bar is None:
            self._bar = self._progress.add_task(heading, total=self._total, state="")
        self._progress.update(self._bar, description=heading, completed=done, state=state)

    def _end_task(self) -> None:
        now = time.monotonic()
        self._task_seconds.append(now - self._begun)
        self._begun, self._seen = now, 0
        if self._bar is not None:
            self._progress.remove_task(self._bar)
            self._bar = None

    def _name_task(self, values: dict[str, Any]) -> str:
        return f"{self._unit} {values['task'] + 1}/{len(self.names)}"

    def _format_left(self, task: int, done: int) -> str:
        """Format the remaining time, if this task has its full length and later tasks take as long as earlier ones."""
        # A run that resumed inside a task has seen fewer epochs than the task has had.
        each = (time.monotonic() - self._begun) / self._seen if self._seen else 0.0
        usual = mean(self._task_seconds) if self._task_seconds else each * self._total
        rest = each * (self._total - done) if self._seen else usual * (1 - done / self._total)
        return f", {format_duration(rest + (len(self.names) - task - 1) * usual)} left" if self._seen or usual else ""


def format_duration(seconds: float) -> str:
    """Format a duration in hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def make_tensorboard_callbacks(folder: Path) -> list[Callback]:
    """Return a list with a callback that writes events for TensorBoard; empty if TensorBoard is not installed."""
    if find_spec("tensorboard") is None:
        return []
    from torch.utils.tensorboard import SummaryWriter

    _silence_writer_threads()
    writer = SummaryWriter(str(folder / "tensorboard"))

    def write_event(event: str, values: dict[str, Any]) -> None:
        scalars, step = _list_scalars(event, values)
        for name, value in scalars.items():
            if value is not None:
                writer.add_scalar(name, value, step)
        writer.flush()

    return [write_event]


def _silence_writer_threads() -> None:
    """Keep threads of TensorBoard from printing their errors, which the writer raises again at the next event."""
    report = threading.excepthook
    if getattr(report, "is_silent", False):
        return

    def report_others(arguments: threading.ExceptHookArgs) -> None:
        if type(arguments.thread).__name__ != "_AsyncWriterThread":
            report(arguments)

    report_others.is_silent = True  # type: ignore[attr-defined]
    threading.excepthook = report_others


def _list_scalars(event: str, values: dict[str, Any]) -> tuple[dict[str, float | None], int]:
    """Return the scalars of an event by the names of their curves, and their position on the horizontal axis."""
    task = values["task"] + 1 if "task" in values else 0
    if event == "epoch":
        names = ("train_loss", "validation_loss", "validation_accuracy", "lr")
        return {f"task {task}/{name}": values[name] for name in names}, values["epoch"]
    if event == "update":
        others = values.keys() - {"task", "update", "step", "seconds"}
        return {f"game {task}/{name}": values[name] for name in others}, values["step"]
    if event == "task":
        row = values["accuracies"]
        return {"mean test accuracy": mean(row)} | _number("test accuracy/task", row), task
    if event in ("evaluation", "game"):
        parts = {name: values.get(name, {}) for name in ("free", "bytes")}
        return {
            **_number("score/game", values["scores"]),
            **_number("normalised score/game", values["normalised"]),
            "accumulated normalised reward": values["accumulated"],
            **{f"{part}/{name}": value for part, own in parts.items() for name, value in own.items()},
        }, values["step"]
    return {}, 0


def _number(name: str, values: list[float | None]) -> dict[str, float | None]:
    return {f"{name} {number}": value for number, value in enumerate(values, start=1)}
