"""Settings of three MinAtar games: Atari games of 10 x 10 pixels, for minutes instead of days; sgp.rl plays them."""

from __future__ import annotations

from dataclasses import dataclass

from sgp.benchmarks.benchmark import GameBenchmark
from sgp.settings import Settings, check_names, setting


@dataclass(frozen=True)
class MinAtar(Settings):
    """Games of 10 x 10 pixels with a channel for each kind of object, padded to ten channels for all games."""

    games: str = "breakout,space-invaders,freeway"
    """Names of the games in training order, separated by commas."""
    sticky: float = setting(0.1, low=0, below=1)
    """Probability that an action is replaced by the previous action."""
    ramping: bool = True
    """Whether the difficulty of a game increases over time, if the game supports it."""
    episode_steps: int = setting(2_500, low=1)
    """Maximum length of a game in steps; longer games are truncated. freeway ends then by itself."""

    def __post_init__(self) -> None:
        """Check the fields, and that no game is named twice."""
        super().__post_init__()
        check_names("games", self.games)


BENCHMARK = GameBenchmark(
    name="minatar",
    description="Three small games in a row, learned by PPO in minutes.",
    settings=MinAtar,
    network="minatar-actor-critic",
)
