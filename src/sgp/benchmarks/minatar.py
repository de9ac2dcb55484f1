"""Three games of MinAtar in a row: Atari games of 10 x 10 pixels, for minutes instead of days; sgp.rl plays them."""

from __future__ import annotations

from dataclasses import dataclass

from sgp.benchmarks import settings as check
from sgp.benchmarks.benchmark import GameBenchmark


@dataclass(frozen=True)
class MinAtar:
    """Games of 10 x 10 pixels with a channel for each kind of thing, padded to ten channels for all games."""

    games: str = "breakout,space-invaders,freeway"
    """Which, in the order in which they are learned, with commas between."""
    sticky: float = 0.1
    """Probability that an action is replaced by the one before, in [0, 1)."""
    ramping: bool = True
    """Whether games become harder as they go on, where they do."""
    episode_steps: int = 2_500
    """A game is cut off after so many steps, at least 1; freeway ends there by itself."""

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
