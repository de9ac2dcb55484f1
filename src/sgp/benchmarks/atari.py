"""Six Atari games in a row, of the paper's second domain; sgp.rl plays them."""

from __future__ import annotations

from dataclasses import dataclass

from sgp.benchmarks import settings as check
from sgp.benchmarks.benchmark import GameBenchmark


@dataclass(frozen=True)
class Atari:
    """Atari games, seen as four grey frames of 84 x 84 pixels, every action kept for four frames."""

    games: str = "kung-fu-master,boxing,jamesbond,krull,riverraid,space-invaders"
    """Which, in the order in which they are learned, with commas between; the paper's six are the default."""
    sticky: float = 0.25
    """Probability that a frame keeps the action of the frame before, in [0, 1): 0.25 for v5 of the games, 0 for
    NoFrameskip-v4."""
    noops: int = 0
    """A game begins after up to so many steps without an action, at least 0: 30 for NoFrameskip-v4 as usual."""
    episodic_life: bool = False
    """Whether a lost life ends an episode of learning; scores are always those of whole games."""
    fire_reset: bool = False
    """Whether a game begins with the action "fire", where it has one."""
    clip_rewards: bool = True
    """Whether only the sign of a reward is learned from; scores are never clipped."""
    episode_steps: int = 27_000
    """A game is cut off after so many steps of four frames, at least 1."""

    def __post_init__(self) -> None:
        check.names("games", self.games)
        check.share("sticky", self.sticky)
        check.in_range("noops", self.noops, 0)
        check.in_range("episode_steps", self.episode_steps, 1)


BENCHMARK = GameBenchmark(
    name="atari",
    description="Six Atari games in a row, learned by PPO.",
    settings=Atari,
    network="actor-critic",
)
