"""Descriptions of benchmarks: what the rest of the package needs to know to run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgp.benchmarks.stream import Stream


@dataclass(frozen=True)
class Benchmark:
    """A named stream of tasks for supervised training.

    Attributes:
        name: Name on the command line and in tables.
        description: One sentence for lists.
        settings: Dataclass of the settings; its defaults are the paper's protocol.
        stream: Function that loads the stream, given the settings, the folder of the data sets (None: $SGP_DATA) and
            the run's seed.
        network: Name of the network that the paper uses.
        datasets: Names of the data sets to read; empty if the benchmark brings its own.
        shape: Function that returns the shape of one input and the number of classes of each head, given the settings,
            so that a network can be validated before any data is read; None if the data decide.
    """

    name: str
    description: str
    settings: type
    stream: Callable[[Any, Path | None, int], Stream]
    network: str
    datasets: tuple[str, ...] = ()
    shape: Callable[[Any], tuple[tuple[int, ...], Sequence[int]]] | None = None


@dataclass(frozen=True)
class GameBenchmark:
    """A named stream of games, which an agent learns one after another.

    Attributes:
        name: Name on the command line and in tables.
        description: One sentence for lists.
        settings: Dataclass of the settings.
        network: Name of the default network.
        stream: Function that loads the games as a `sgp.rl.games.GameStream`, given the settings; None for the
            benchmarks that `sgp.rl` loads itself, whose names and settings can so be known without its packages.
        datasets: Always empty: games bring their own data.
    """

    name: str
    description: str
    settings: type
    network: str
    stream: Callable[[Any], Any] | None = None
    datasets: tuple[str, ...] = ()
