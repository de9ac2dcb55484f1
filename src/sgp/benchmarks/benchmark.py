"""What a benchmark is to the rest of the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgp.benchmarks.stream import Stream


@dataclass(frozen=True)
class Benchmark:
    """A stream of tasks under a name, with what is needed to run it.

    Attributes:
        name: what it is called on the command line and in tables.
        description: one sentence for people who choose.
        settings: dataclass of what can be set; its defaults are the paper's protocol.
        stream: gives the tasks from the settings, the folder that the data sets lie in (None: $SGP_DATA) and the
            run's seed.
        network: name of the network that the paper uses on it.
        datasets: names of the data sets that it reads; none if it brings its own.
        shape: of one input, and the number of classes of each head, from the settings: what a network is built for, so
            that settings which do not go with it are told before any data is read; None if only the data tell.
    """

    name: str
    description: str
    settings: type
    stream: Callable[[Any, Path | None, int], Stream]
    network: str
    datasets: tuple[str, ...]
    shape: Callable[[Any], tuple[tuple[int, ...], Sequence[int]]] | None = None


@dataclass(frozen=True)
class GameBenchmark:
    """A stream of games that an agent learns one after another, with what is needed to run it.

    Attributes:
        name: what it is called on the command line and in tables.
        description: one sentence for people who choose.
        settings: dataclass of what can be set.
        network: name of the network that is used on it.
        stream: gives the games from the settings, as `sgp.rl.games.GameStream`; None for those that sgp.rl makes
            itself, since nothing of reinforcement learning is needed to know their names and settings.
        datasets: none; a game brings its own.
    """

    name: str
    description: str
    settings: type
    network: str
    stream: Callable[[Any], Any] | None = None
    datasets: tuple[str, ...] = ()
