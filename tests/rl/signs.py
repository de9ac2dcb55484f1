"""A small game for tests: a sign shows which action is rewarded, and a game is a few signs long.

The file is also imported by `sgp run --import`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from sgp.benchmarks import BENCHMARKS, GameBenchmark
from sgp.rl.games import Frames, GameEnv, GameStream, GameTask, Scale, StepResult, parse_games

INPUTS = (10, 10, 10)
ACTIONS = {"two": 2, "three": 3, "five": 5}
PAY = 7.0


@dataclass(frozen=True)
class Signs:
    """Settings of the game of signs."""

    games: str = "two,three"
    """Names of the games, by their number of actions: two, three or five."""
    length: int = 6
    """Length of a game in steps."""
    cut: int = 1000
    """Number of steps after which a game is truncated."""


class SignEnv(GameEnv):
    """Copies of a game of signs; a loss of a life after every second sign ends an episode, not the game."""

    def __init__(self, name: str, settings: Signs, copies: int, fail_at: Callable[[], bool] | None = None) -> None:
        self.settings = settings
        self.fail_at = fail_at
        self._random = [np.random.RandomState(0) for _ in range(copies)]
        self._steps = np.zeros(copies, dtype=np.int64)
        self._signs = np.zeros(copies, dtype=np.int64)
        space = Box(low=0, high=1, shape=INPUTS, dtype=np.uint8)
        super().__init__(name, copies, space, ACTIONS[name], clip_rewards=True)

    def start_games(self, seeds: Sequence[int | None]) -> Frames:
        for copy, seed in enumerate(seeds):
            if seed is not None:
                self._random[copy] = np.random.RandomState(seed)
        self._steps[:] = 0
        return self._show(range(self.num_envs))

    def play_step(self, actions: NDArray[np.int64]) -> StepResult:
        if self.fail_at is not None and self.fail_at():
            raise MemoryError("no more signs")
        rewards = np.where(actions == self._signs, PAY, -1.0).astype(np.float32)
        self._steps += 1
        lost = self._steps >= self.settings.length
        cut = ~lost & (self._steps >= self.settings.cut)
        last = self._frames() if cut.any() else None
        life = self._steps % 2 == 0
        self._steps[lost | cut] = 0
        frames = self._show(range(self.num_envs))
        return StepResult(frames, rewards, lost | cut | life, lost | cut, cut, last)

    def _show(self, copies: range) -> Frames:
        for copy in copies:
            self._signs[copy] = self._random[copy].randint(self.actions)
        return self._frames()

    def _frames(self) -> Frames:
        frames = np.zeros((self.num_envs, *INPUTS), dtype=np.uint8)
        for copy, sign in enumerate(self._signs):
            # Where a sign stands differs from game to game, so that games have something to forget of each other.
            frames[copy, (sign + 3 * self.actions) % 10, sign : sign + 4, self.actions : self.actions + 4] = 1
        return frames


def stream(settings: Signs, fail_at: Callable[[], bool] | None = None) -> GameStream:
    def task(name: str) -> GameTask:
        make = partial(_make, name, settings, fail_at)
        return GameTask(name, ACTIONS[name], make, None if name == "five" else Scale(0.0, PAY * settings.length))

    return GameStream(INPUTS, [task(name) for name in parse_games(settings.games, list(ACTIONS))])


def _make(name: str, settings: Signs, fail_at: Callable[[], bool] | None, copies: int, threads: int) -> SignEnv:
    return SignEnv(name, settings, copies, fail_at)


BENCHMARK = GameBenchmark(
    name="signs",
    description="Signs that say what to do.",
    settings=Signs,
    network="minatar-actor-critic",
    stream=stream,
)
if __name__.startswith("sgp_import"):
    BENCHMARKS.add("signs", BENCHMARK)
