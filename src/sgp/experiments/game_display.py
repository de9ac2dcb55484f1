"""Progress display of a run on games: a live line at a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console

from sgp.experiments.config import GameConfig
from sgp.experiments.display import LiveDisplay, span


class GameDisplay(LiveDisplay):
    """Print the progress of each update at a terminal, and each evaluation.

    Args:
        console: Console to print to.
        config: Config of the run.
        names: Names of the games.
    """

    def __init__(self, console: Console, config: GameConfig, names: list[str]) -> None:
        super().__init__(console, names)
        self.training = config.trainer
        self._begun = time.monotonic()

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        """Print an event of the run."""
        if event == "update":
            self._show_update(values)
        elif event in ("evaluation", "game"):
            self._print_evaluation(values)

    def _show_update(self, values: dict[str, Any]) -> None:
        self._seen += 1
        if self._progress.disable:
            return
        heading = self._format_heading(values["task"])
        score = "" if values["score"] is None else f"score {values['score']:.1f}, "
        state = f"{score}entropy {values['entropy']:.2f}, {self._format_left(values)}"
        if self._bar is None:
            self._bar = self._progress.add_task(heading, total=self.training.updates, state="")
        self._progress.update(self._bar, description=heading, completed=values["update"], state=state)

    def _print_evaluation(self, values: dict[str, Any]) -> None:
        scores = ", ".join(f"{name} {score:.1f}" for name, score in zip(self.names, values["scores"], strict=False))
        reward = "" if values["accumulated"] is None else f"; reward {values['accumulated']:.2f}"
        heading = f"{self._format_heading(values['task'])} after {values['update']}/{self.training.updates} updates"
        left = f", {self._format_left(values)}" if self._seen else ""
        self.console.print(
            f"{heading}: {scores}{reward}{left}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    def _format_heading(self, task: int) -> str:
        return f"game {task + 1}/{len(self.names)}"

    def _format_left(self, values: dict[str, Any]) -> str:
        """Estimate the time that is left, if later updates take as long as earlier ones."""
        done = values["task"] * self.training.updates + values["update"]
        each = (time.monotonic() - self._begun) / self._seen
        return f"{span(each * (len(self.names) * self.training.updates - done))} left"
