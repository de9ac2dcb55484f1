"""Continual reinforcement learning: games in a row, learned by Stable-Baselines3's PPO.

Nothing outside this room needs gymnasium, the Arcade Learning Environment or Stable-Baselines3, and this file does not
either: what does is imported when a stream of games is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sgp.benchmarks import BENCHMARKS, GameBenchmark
from sgp.benchmarks.datasets.extra import need
from sgp.runs.games import GameConfig

if TYPE_CHECKING:
    from sgp.rl.games import GameStream

# Modules that the games of a benchmark need beside these two.
NEEDED = {"atari": ("ale_py",), "minatar": ("minatar",)}


def stream_of(config: GameConfig) -> GameStream:
    """The games of a run.

    Raises:
        ImportError: something optional is not installed; the message says what to install.
        UnknownName: there is no such game.
        GameError: a game cannot be started.
    """
    for module in ("gymnasium", "stable_baselines3", *NEEDED.get(config.benchmark, ())):
        need(module)
    benchmark = BENCHMARKS[config.benchmark]
    assert isinstance(benchmark, GameBenchmark)
    make = benchmark.stream or import_module(f"sgp.rl.{config.benchmark}").stream
    stream: GameStream = make(config.stream)
    return stream
