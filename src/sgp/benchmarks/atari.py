"""Settings of the paper's six Atari games; sgp.rl plays them."""

from __future__ import annotations

from dataclasses import dataclass

from sgp.benchmarks.benchmark import GameBenchmark
from sgp.settings import Settings, check_names, setting


@dataclass(frozen=True)
class Atari(Settings):
    """Atari games, observed as four grey frames of 84 x 84 pixels; each action is repeated for four frames."""

    games: str = "kung-fu-master,boxing,jamesbond,krull,riverraid,space-invaders"
    """Names of the games in training order, separated by commas; the paper's six are the default."""
    sticky: float = setting(0.25, low=0, below=1)
    """Probability that a frame repeats the action of the previous frame: 0.25 for v5 of the games, 0 for
    NoFrameskip-v4."""
    noops: int = setting(0, low=0)
    """Maximum number of steps without an action at the start of a game; usually 30 for NoFrameskip-v4."""
    episodic_life: bool = False
    """Whether a lost life ends a training episode; scores are always those of whole games."""
    fire_reset: bool = False
    """Whether a game begins with the action "fire", if it has one."""
    clip_rewards: bool = True
    """Whether training uses only the sign of a reward; scores are never clipped."""
    episode_steps: int = setting(27_000, low=1)
    """Maximum length of a game in steps of four frames; longer games are truncated."""

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
