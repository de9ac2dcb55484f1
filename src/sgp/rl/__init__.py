"""Streams of games, and Stable-Baselines3's PPO for agents that learn several of them.

gymnasium, the Arcade Learning Environment and Stable-Baselines3 are imported only when games are loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sgp.benchmarks import BENCHMARKS, GameBenchmark
from sgp.extras import import_extra

if TYPE_CHECKING:
    from sgp.rl.games import GameStream

# Further modules that the games of a benchmark need.
NEEDED = {"atari": ("ale_py",), "minatar": ("minatar",)}


def load_games(benchmark: str, settings: Any) -> GameStream:
    """Load the games of a benchmark.

    A missing package raises ImportError, an unknown game UnknownName, and a game that cannot be started GameError.

    Args:
        benchmark: Name of a benchmark of games.
        settings: Its settings.
    """
    for module in ("gymnasium", "stable_baselines3", *NEEDED.get(benchmark, ())):
        import_extra(module)
    found = BENCHMARKS[benchmark]
    assert isinstance(found, GameBenchmark)
    load = found.stream or import_module(f"sgp.rl.{benchmark}").load_stream
    stream: GameStream = load(settings)
    return stream
