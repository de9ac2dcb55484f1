"""What a person sees of a run on games while it goes on: a live line at a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console

from sgp.experiments.config import GameConfig
from sgp.experiments.display import LiveDisplay, span


class GameDisplay(LiveDisplay):
    """Tells of each update at a terminal, and of each evaluation.

    Args:
        console: where to.
        config: of the run.
        names: of the games.
    """

    def __init__(self, console: Console, config: GameConfig, names: list[str]) -> None:
        super().__init__(console, names)
        self.training = config.trainer
        self._begun = time.monotonic()

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        """An event of the run."""
        if event == "update":
            self._update(values)
        elif event in ("evaluation", "game"):
            self._evaluation(values)

    def _update(self, values: dict[str, Any]) -> None:
        self._seen += 1
        if self._progress.disable:
            return
        heading = self._heading(values["task"])
        score = "" if values["score"] is None else f"score {values['score']:.1f}, "
        state = f"{score}entropy {values['entropy']:.2f}, {self._left(values)}"
        if self._bar is None:
            self._bar = self._progress.add_task(heading, total=self.training.updates, state="")
        self._progress.update(self._bar, description=heading, completed=values["update"], state=state)

    def _evaluation(self, values: dict[str, Any]) -> None:
        scores = ", ".join(f"{name} {score:.1f}" for name, score in zip(self.names, values["scores"], strict=False))
        reward = "" if values["accumulated"] is None else f"; reward {values['accumulated']:.2f}"
        heading = f"{self._heading(values['task'])} after {values['update']}/{self.training.updates} updates"
        left = f", {self._left(values)}" if self._seen else ""
        self.console.print(
            f"{heading}: {scores}{reward}{left}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    def _heading(self, task: int) -> str:
        return f"game {task + 1}/{len(self.names)}"

    def _left(self, values: dict[str, Any]) -> str:
        """The time to the end, if later updates take as long as those that were seen."""
        done = values["task"] * self.training.updates + values["update"]
        each = (time.monotonic() - self._begun) / self._seen
        return f"{span(each * (len(self.names) * self.training.updates - done))} left"
