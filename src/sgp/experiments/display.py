"""Progress display of a run: a live line at a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from sgp.experiments.config import Config


class LiveDisplay:
    """Base class of the progress displays: a bar at a terminal, and lines that stay.

    Use it as a context manager, and pass it to the trainer as a callback.

    Args:
        console: Console to print to.
        names: Names of the tasks.
    """

    def __init__(self, console: Console, names: list[str]) -> None:
        self.console = console
        self.names = names
        self._seen = 0
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


class Display(LiveDisplay):
    """Print the progress of each epoch and the result of each task.

    Args:
        console: Console to print to.
        config: Config of the run.
        names: Names of the tasks.
    """

    def __init__(self, console: Console, config: Config, names: list[str]) -> None:
        super().__init__(console, names)
        self.epochs = config.trainer.epochs
        self._task_begun = time.monotonic()
        self._task_seconds: list[float] = []

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        """Print an event of the run."""
        if event == "epoch":
            self._print_epoch(values)
        elif event == "task":
            self._print_task(values)

    def _print_epoch(self, values: dict[str, Any]) -> None:
        task, epoch = values["task"], values["epoch"]
        self._seen += 1
        left = self._estimate_left(task, epoch)
        validation = values["validation_accuracy"]
        # A live line has to fit in 80 characters.
        label = "validation" if self._progress.disable else "val"
        state = (
            f"loss {values['train_loss']:.3f}, "
            + (f"{label} {validation:.1f} %, " if validation is not None else "")
            + f"lr {values['lr']:.2g}, {span(left)} left"
        )
        heading = f"task {task + 1}/{len(self.names)}"
        if self._progress.disable:
            self.console.print(f"{heading} epoch {epoch}/{self.epochs}: {state}", highlight=False, soft_wrap=True)
            return
        if self._bar is None:
            self._bar = self._progress.add_task(heading, total=self.epochs, state="")
        self._progress.update(self._bar, description=f"{heading}, epoch {epoch}", completed=epoch, state=state)

    def _print_task(self, values: dict[str, Any]) -> None:
        now = time.monotonic()
        self._task_seconds.append(now - self._task_begun)
        self._task_begun, self._seen = now, 0
        row: list[float] = values["accuracies"]
        heading = f"task {values['task'] + 1}/{len(self.names)}"
        if self._bar is not None:
            self._progress.remove_task(self._bar)
            self._bar = None
        self.console.print(
            f"{heading} {values['name']}: {row[-1]:.1f} %; all so far {sum(row) / len(row):.1f} % "
            f"({span(self._task_seconds[-1])})",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    def _estimate_left(self, task: int, epoch: int) -> float:
        """Estimate the seconds left, if this task uses all its epochs and later tasks take as long as earlier ones."""
        spent = time.monotonic() - self._task_begun
        # A run that resumed inside a task has seen fewer epochs than the task has had.
        each = spent / self._seen
        usual = sum(self._task_seconds) / len(self._task_seconds) if self._task_seconds else each * self.epochs
        return each * (self.epochs - epoch) + (len(self.names) - task - 1) * usual


def span(seconds: float) -> str:
    """Format a duration for people to read."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
