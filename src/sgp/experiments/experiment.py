"""What learners of every kind leave in a run's folder: events, and the seconds of each phase between them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from sgp.experiments.folder import RunFolder


class Callback(Protocol):
    """Is told of every event of a run, as it is written to the metrics."""

    def __call__(self, event: str, values: dict[str, Any]) -> None: ...


class Experiment:
    """A run that tells of itself.

    Args:
        folder: where it leaves its traces.
        callbacks: are told of every event.
    """

    def __init__(self, folder: RunFolder, *callbacks: Callback) -> None:
        self.folder = folder
        self.callbacks = callbacks
        self._seconds: dict[str, float] = defaultdict(float)

    def _log(self, event: str, **values: Any) -> None:
        """Write an event, with the seconds that each phase has taken since the last one."""
        if self._seconds:
            values["seconds"] = {phase: round(seconds, 4) for phase, seconds in self._seconds.items()}
            self._seconds.clear()
        self.folder.log(event, **values)
        for callback in self.callbacks:
            callback(event, values)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - start
