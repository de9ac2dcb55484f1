"""Games of MinAtar, which are small enough for Python: copies are played one after another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from sgp.benchmarks.datasets.extra import need
from sgp.benchmarks.minatar import MinAtar
from sgp.paper import scores
from sgp.rl.games import Frames, GameEnv, GameStream, GameTask, Played, Scale, named

# The most channels that a game has; those that another one lacks stay empty.
CHANNELS = 10
INPUTS = (CHANNELS, 10, 10)
GAMES = ("asterix", "breakout", "freeway", "seaquest", "space-invaders")


class MinAtarEnv(GameEnv):
    """Copies of a game of MinAtar.

    Args:
        name: of the game, such as space-invaders.
        settings: how it is played.
        copies: how many.
    """

    def __init__(self, name: str, settings: MinAtar, copies: int) -> None:
        environment = need("minatar").Environment
        self._copies = [
            environment(name.replace("-", "_"), sticky_action_prob=settings.sticky, difficulty_ramping=settings.ramping)
            for _ in range(copies)
        ]
        # Only those actions that do something in this game.
        self._meaning: list[int] = self._copies[0].minimal_action_set()
        self._most_steps = settings.episode_steps
        self._steps = np.zeros(copies, dtype=np.int64)
        space = Box(low=0, high=1, shape=INPUTS, dtype=np.uint8)
        super().__init__(name, copies, space, len(self._meaning), clip_rewards=False)

    def begin(self, seeds: Sequence[int | None]) -> Frames:
        frames = np.zeros((self.num_envs, *INPUTS), dtype=np.uint8)
        for number, (copy, seed) in enumerate(zip(self._copies, seeds, strict=True)):
            if seed is not None:
                copy.seed(seed)
            self._begin(copy)
            _show(copy, frames[number])
        self._steps[:] = 0
        return frames

    def play(self, actions: NDArray[np.int64]) -> Played:
        # New ones at each step: the agent still holds the last.
        frames = np.zeros((self.num_envs, *INPUTS), dtype=np.uint8)
        rewards = np.zeros(self.num_envs, dtype=np.float32)
        lost = np.zeros(self.num_envs, dtype=np.bool_)
        for number, copy in enumerate(self._copies):
            rewards[number], lost[number] = copy.act(self._meaning[actions[number]])
            _show(copy, frames[number])
        self._steps += 1
        cut = ~lost & (self._steps >= self._most_steps)
        over = lost | cut
        last = frames.copy() if cut.any() else None
        for again in np.flatnonzero(over):
            self._begin(self._copies[again])
            frames[again] = 0
            _show(self._copies[again], frames[again])
        self._steps[over] = 0
        return Played(frames, rewards, over, over, cut, last)

    @staticmethod
    def _begin(copy: Any) -> None:
        copy.reset()
        copy.last_action = 0  # MinAtar leaves the last game's, which may be the first to be repeated


def stream(settings: MinAtar) -> GameStream:
    """The games of the settings."""
    need("minatar")
    scales = scores("minatar")
    games = []
    for name in named(settings.games, GAMES):
        make = partial(_make, name, settings)
        actions = make(1, 1).actions
        games.append(GameTask(name, actions, make, Scale(**scales[name]) if name in scales else None))
    return GameStream(INPUTS, games)


def _make(name: str, settings: MinAtar, copies: int, threads: int) -> MinAtarEnv:
    return MinAtarEnv(name, settings, copies)


def _show(copy: Any, frame: Frames) -> None:
    """Write what a copy shows, [10, 10, channels], into a frame of zeros."""
    seen = copy.state()
    frame[: seen.shape[2]] = seen.transpose(2, 0, 1)
