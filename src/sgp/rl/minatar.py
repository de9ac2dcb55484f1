"""Games of MinAtar, which are so small that copies are played one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from sgp.benchmarks.settings import MinAtar
from sgp.extras import import_extra
from sgp.rl.games import Frames, GameEnv, GameStream, StepResult, make_stream

# The largest number of channels of a game; the additional channels of other games are 0.
CHANNELS = 10
INPUTS = (CHANNELS, 10, 10)
GAMES = ("asterix", "breakout", "freeway", "seaquest", "space-invaders")


class MinAtarEnv(GameEnv):
    """Copies of a game of MinAtar.

    Args:
        name: Name of the game, such as space-invaders.
        settings: Settings of the benchmark.
        copies: Number of copies.
    """

    def __init__(self, name: str, settings: MinAtar, copies: int) -> None:
        environment = import_extra("minatar").Environment
        options = {"sticky_action_prob": settings.sticky, "difficulty_ramping": settings.ramping}
        self._copies = [environment(name.replace("-", "_"), **options) for _ in range(copies)]
        # Only the actions that have an effect in this game.
        self._action_ids: list[int] = self._copies[0].minimal_action_set()
        self._limit = settings.episode_steps
        self._steps = np.zeros(copies, dtype=np.int64)
        space = Box(low=0, high=1, shape=INPUTS, dtype=np.uint8)
        super().__init__(name, copies, space, len(self._action_ids), clip_rewards=False)

    def start_games(self, seeds: Sequence[int | None]) -> Frames:
        for number, seed in enumerate(seeds):
            if seed is not None:
                self._copies[number].seed(seed)
            self._restart(number)
        return self._observe()

    def play_step(self, actions: NDArray[np.int64]) -> StepResult:
        acts = [copy.act(self._action_ids[action]) for copy, action in zip(self._copies, actions, strict=True)]
        rewards, lost = np.array([act[0] for act in acts], np.float32), np.array([act[1] for act in acts], np.bool_)
        self._steps += 1
        truncated = ~lost & (self._steps >= self._limit)
        over = lost | truncated
        last = self._observe() if truncated.any() else None
        for number in np.flatnonzero(over).tolist():
            self._restart(number)
        return StepResult(self._observe(), rewards, over, over, truncated, last)

    def _restart(self, number: int) -> None:
        copy: Any = self._copies[number]
        copy.reset()
        copy.last_action = 0  # MinAtar keeps the last game's, which may be the first to be repeated
        self._steps[number] = 0

    def _observe(self) -> Frames:
        """Return the current frames, in a new array, since the agent still holds the previous one."""
        frames = np.zeros((self.num_envs, *INPUTS), dtype=np.uint8)
        for frame, copy in zip(frames, self._copies, strict=True):
            state = copy.state()  # [10, 10, channels]
            frame[: state.shape[2]] = state.transpose(2, 0, 1)
        return frames


def load_stream(settings: MinAtar) -> GameStream:
    """Load the games of the settings."""
    return make_stream(
        "minatar", settings.games, GAMES, INPUTS, lambda name, copies, _: MinAtarEnv(name, settings, copies)
    )
