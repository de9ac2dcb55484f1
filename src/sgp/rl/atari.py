"""Atari games by the Arcade Learning Environment, whose copies run in threads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from ale_py import roms
from ale_py.vector_env import AtariVectorEnv
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from sgp.benchmarks.atari import Atari
from sgp.paper import scores
from sgp.rl.games import Frames, GameEnv, GameStream, GameTask, Played, Scale, named
from sgp.rl.settings import GameError

INPUTS = (4, 84, 84)
FRAME_SKIP = 4


class AtariEnv(GameEnv):
    """Copies of an Atari game, played in threads.

    Args:
        name: of the game, such as kung-fu-master.
        settings: how it is played.
        copies: how many.
        threads: how many play them.
    """

    def __init__(self, name: str, settings: Atari, copies: int, threads: int) -> None:
        self._env = AtariVectorEnv(
            rom_of(name),
            copies,
            num_threads=min(copies, threads),
            autoreset_mode=AutoresetMode.SAME_STEP,
            max_num_frames_per_episode=FRAME_SKIP * settings.episode_steps,
            repeat_action_probability=settings.sticky,
            frameskip=FRAME_SKIP,
            noop_max=settings.noops,
            use_fire_reset=settings.fire_reset,
            # Its episodic_life would begin a new game at every lost life; this goes on with the next life.
            life_loss_info=settings.episodic_life,
            # Scores are made of the game's own rewards.
            reward_clipping=False,
        )
        self._frames = np.zeros(copies, dtype=np.int64)
        space = Box(low=0, high=255, shape=INPUTS, dtype=np.uint8)
        super().__init__(name, copies, space, int(self._env.single_action_space.n), clip_rewards=settings.clip_rewards)

    def begin(self, seeds: Sequence[int | None]) -> Frames:
        given = None if seeds[0] is None else np.array(seeds)
        frames, told = self._env.reset(seed=given)
        self._frames[:] = told["episode_frame_number"]
        return np.asarray(frames)

    def play(self, actions: NDArray[np.int64]) -> Played:
        frames, rewards, terminated, truncated, told = self._env.step(actions)
        # A lost life ends an episode too, but only a new game counts its frames from the start.
        anew = told["episode_frame_number"] <= self._frames
        self._frames[:] = told["episode_frame_number"]
        over = (terminated & anew) | truncated
        cut = truncated & ~terminated
        return Played(frames, rewards.astype(np.float32), terminated | truncated, over, cut, told.get("final_obs"))


def stream(settings: Atari) -> GameStream:
    """The games of the settings, all of them of the Arcade Learning Environment's own files."""
    known, scales = [_shown(rom) for rom in roms.get_all_rom_ids()], scores("atari")
    games = []
    for name in named(settings.games, known):
        make = partial(_make, name, settings)
        # The number of actions is the game's own secret.
        actions = make(1, 1).actions
        games.append(GameTask(name, actions, make, Scale(**scales[name]) if name in scales else None))
    return GameStream(INPUTS, games)


def rom_of(name: str) -> str:
    """What the Arcade Learning Environment calls a game."""
    return name.replace("-", "_")


def _shown(rom: str) -> str:
    return rom.replace("_", "-")


def _make(name: str, settings: Atari, copies: int, threads: int) -> AtariEnv:
    try:
        return AtariEnv(name, settings, copies, threads)
    except Exception as error:
        raise GameError(f"the game {name} cannot be started ({error}): is its file in ale-py?") from error
