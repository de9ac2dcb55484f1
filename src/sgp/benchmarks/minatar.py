"""Settings of three MinAtar games: Atari games of 10 x 10 pixels, for minutes instead of days; sgp.rl plays them."""

from __future__ import annotations

from dataclasses import dataclass

from sgp.benchmarks import settings as check
from sgp.benchmarks.benchmark import GameBenchmark


@dataclass(frozen=True)
class MinAtar:
    """Games of 10 x 10 pixels with a channel for each kind of object, padded to ten channels for all games."""

    games: str = "breakout,space-invaders,freeway"
    """Names of the games in training order, separated by commas."""
    sticky: float = 0.1
    """Probability that an action is replaced by the previous action, in [0, 1)."""
    ramping: bool = True
    """Whether the difficulty of a game increases over time, if the game supports it."""
    episode_steps: int = 2_500
    """Maximum length of a game in steps, at least 1; longer games are truncated. freeway ends then by itself."""

    def __post_init__(self) -> None:
        check.names("games", self.games)
        check.share("sticky", self.sticky)
        check.in_range("episode_steps", self.episode_steps, 1)


BENCHMARK = GameBenchmark(
    name="minatar",
    description="Three small games in a row, learned by PPO in minutes.",
    settings=MinAtar,
    network="minatar-actor-critic",
)
