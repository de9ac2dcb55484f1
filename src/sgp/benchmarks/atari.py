"""Six Atari games in a row, of the paper's second domain; sgp.rl plays them."""

from __future__ import annotations

from dataclasses import dataclass

from sgp.benchmarks.benchmark import GameBenchmark
from sgp.settings import Settings, check_names, setting


@dataclass(frozen=True)
class Atari(Settings):
    """Atari games, seen as four grey frames of 84 x 84 pixels, every action kept for four frames."""

    games: str = "kung-fu-master,boxing,jamesbond,krull,riverraid,space-invaders"
    """Which, in the order in which they are learned, with commas between; the paper's six are the default."""
    sticky: float = setting(0.25, low=0, below=1)
    """Probability that a frame keeps the action of the frame before: 0.25 for v5 of the games, 0 for
    NoFrameskip-v4."""
    noops: int = setting(0, low=0)
    """A game begins after up to so many steps without an action: 30 for NoFrameskip-v4 as usual."""
    episodic_life: bool = False
    """Whether a lost life ends an episode of learning; scores are always those of whole games."""
    fire_reset: bool = False
    """Whether a game begins with the action "fire", where it has one."""
    clip_rewards: bool = True
    """Whether only the sign of a reward is learned from; scores are never clipped."""
    episode_steps: int = setting(27_000, low=1)
    """A game is cut off after so many steps of four frames."""

    def __post_init__(self) -> None:
        """Check the fields, and that no game is named twice."""
        super().__post_init__()
        check_names("games", self.games)


BENCHMARK = GameBenchmark(
    name="atari",
    description="Six Atari games in a row, learned by PPO.",
    settings=Atari,
    network="actor-critic",
)
