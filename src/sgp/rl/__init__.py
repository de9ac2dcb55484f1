"""Streams of games, and Stable-Baselines3's PPO for agents that learn several of them.

This file imports neither gymnasium, the Arcade Learning Environment nor Stable-Baselines3 before games are
loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sgp.benchmarks import BENCHMARKS, GameBenchmark
from sgp.benchmarks.datasets.extra import need

if TYPE_CHECKING:
    from sgp.rl.games import GameStream

# Modules that the games of a benchmark need beside these two.
NEEDED = {"atari": ("ale_py",), "minatar": ("minatar",)}


def load_games(benchmark: str, settings: Any) -> GameStream:
    """Load the games of a benchmark.

    Args:
        benchmark: Name of a benchmark of games.
        settings: Its settings.

    Raises:
        ImportError: An optional package is not installed; the message says what to install.
        UnknownName: There is no such game.
        GameError: A game cannot be started.
    """
    for module in ("gymnasium", "stable_baselines3", *NEEDED.get(benchmark, ())):
        need(module)
    found = BENCHMARKS[benchmark]
    assert isinstance(found, GameBenchmark)
    make = found.stream or import_module(f"sgp.rl.{benchmark}").stream
    stream: GameStream = make(settings)
    return stream
