"""Atari games of the Arcade Learning Environment, whose copies run in threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ale_py import roms
from ale_py.vector_env import AtariVectorEnv
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from sgp.benchmarks.settings import Atari
from sgp.rl.games import Frames, GameEnv, GameStream, StepResult, make_stream
from sgp.rl.settings import GameError

INPUTS = (4, 84, 84)
FRAME_SKIP = 4


class AtariEnv(GameEnv):
    """Copies of an Atari game, which run in threads.

    Args:
        name: Name of the game, such as kung-fu-master.
        settings: Settings of the benchmark.
        copies: Number of copies.
        threads: Maximum number of threads.
    """

    def __init__(self, name: str, settings: Atari, copies: int, threads: int) -> None:
        self._env = AtariVectorEnv(
            name.replace("-", "_"),
            copies,
            num_threads=min(copies, threads),
            autoreset_mode=AutoresetMode.SAME_STEP,
            max_num_frames_per_episode=FRAME_SKIP * settings.episode_steps,
            repeat_action_probability=settings.sticky,
            frameskip=FRAME_SKIP,
            noop_max=settings.noops,
            use_fire_reset=settings.fire_reset,
            # Its episodic_life would start a new game at every lost life; this continues with the next life.
            life_loss_info=settings.episodic_life,
            # Scores are sums of the game's own rewards.
            reward_clipping=False,
        )
        self._frames = np.zeros(copies, dtype=np.int64)
        space = Box(low=0, high=255, shape=INPUTS, dtype=np.uint8)
        super().__init__(name, copies, space, int(self._env.single_action_space.n), clip_rewards=settings.clip_rewards)

    def start_games(self, seeds: Sequence[int | None]) -> Frames:
        frames, info = self._env.reset(seed=None if seeds[0] is None else np.array(seeds))
        self._frames[:] = info["episode_frame_number"]
        return np.asarray(frames)

    def play_step(self, actions: NDArray[np.int64]) -> StepResult:
        frames, rewards, terminated, truncated, info = self._env.step(actions)
        # A lost life ends an episode too, but only a new game counts its frames from the start.
        restarted = info["episode_frame_number"] <= self._frames
        self._frames[:] = info["episode_frame_number"]
        return StepResult(
            frames,
            rewards.astype(np.float32),
            ended=terminated | truncated,
            over=(terminated & restarted) | truncated,
            truncated=truncated & ~terminated,
            last=info.get("final_obs"),
        )


def load_stream(settings: Atari) -> GameStream:
    """Load the games of the settings, from the files of the Arcade Learning Environment."""

    def make(name: str, copies: int, threads: int) -> AtariEnv:
        try:
            return AtariEnv(name, settings, copies, threads)
        except Exception as error:
            raise GameError(f"the game {name} cannot be started ({error}): is its file in ale-py?") from error

    known = [rom.replace("_", "-") for rom in roms.get_all_rom_ids()]
    return make_stream("atari", settings.games, known, INPUTS, make)
