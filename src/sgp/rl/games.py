"""Streams of games, and a vectorized environment of Stable-Baselines3 for copies of a game."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from sgp.paper import scores
from sgp.registry import UnknownName, unknown
from sgp.rl.settings import GameError

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
# Observations, of the dtype of the game.
Frames = NDArray[Any]


@dataclass(frozen=True)
class Scale:
    """The two scores of a game that are normalized to 0 and 1.

    Attributes:
        random: Score of an agent that acts at random.
        reference: Score of an agent that has learned the game.
    """

    random: float
    reference: float

    def normalize(self, score: float) -> float:
        """Compute (score - random) / (reference - random), which is not clipped."""
        return (score - self.random) / (self.reference - self.random)


@dataclass(frozen=True)
class GameTask:
    """One game of a stream.

    Attributes:
        name: Name on the command line and in tables.
        actions: Number of actions.
        make: Function `make(copies, threads)` that creates copies of the game.
        scale: Scale of the scores; None if it is not known.
    """

    name: str
    actions: int
    make: Callable[[int, int], GameEnv]
    scale: Scale | None = None


@dataclass(frozen=True)
class GameStream:
    """Games in training order.

    Attributes:
        inputs: Shape of an observation, the same for all games.
        games: The games.
    """

    inputs: tuple[int, ...]
    games: Sequence[GameTask]

    @property
    def names(self) -> list[str]:
        """Names of the games."""
        return [game.name for game in self.games]

    @property
    def actions(self) -> list[int]:
        """Number of actions of each game."""
        return [game.actions for game in self.games]

    def __len__(self) -> int:
        return len(self.games)


@dataclass(frozen=True)
class StepResult:
    """Result of a step of all copies.

    Attributes:
        frames: Observations after the step; in copies whose game is over, the first of the next game.
        rewards: Rewards of the game.
        ended: Whether a training episode has ended: the game is over, or a life is lost where that counts.
        over: Whether the game is over.
        truncated: Whether the game was ended by its time limit.
        last: Observations at the end of truncated games; None if there are none.
    """

    frames: Frames
    rewards: Floats
    ended: Flags
    over: Flags
    truncated: Flags
    last: Frames | None = None


class GameEnv(VecEnv):
    """Copies of one game, which start again when they are over.

    A score is the sum of the game's own rewards from its start to its end; the agent may be given only their signs.
    A subclass implements `start_games` and `play_step`.

    Args:
        name: Name of the game.
        copies: Number of copies.
        frames: Space of the observations.
        actions: Number of actions.
        clip_rewards: Whether the agent is given only the sign of each reward.

    Attributes:
        actions: Number of actions.
        finished: Scores of the games that are over, until the caller removes them.
    """

    def __init__(self, name: str, copies: int, frames: Box, actions: int, *, clip_rewards: bool) -> None:
        self.name = name
        self.actions = actions
        self.clip_rewards = clip_rewards
        self._actions: NDArray[np.int64] = np.zeros(copies, dtype=np.int64)
        self._scores = np.zeros(copies)
        self.finished: list[float] = []
        super().__init__(copies, frames, Discrete(actions))

    @abstractmethod
    def start_games(self, seeds: Sequence[int | None]) -> Frames:
        """Start a game in each copy, from its seed if it has one, and return the observations."""

    @abstractmethod
    def play_step(self, actions: NDArray[np.int64]) -> StepResult:
        """Play a step in each copy."""

    def reset(self) -> Frames:
        """Start new games with the seeds of the last call of `seed`."""
        with self._name_failures():
            frames = self.start_games(self._seeds)
        self._scores[:] = 0
        self._reset_seeds()
        return frames

    def step_async(self, actions: NDArray[np.int64]) -> None:
        """Store the actions of the next step."""
        self._actions = actions

    def step_wait(self) -> tuple[Frames, Floats, Flags, list[dict[str, Any]]]:
        """Play a step with the stored actions."""
        with self._name_failures():
            result = self.play_step(self._actions)
        self._scores += result.rewards
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for copy in np.flatnonzero(result.over):
            infos[copy]["score"] = float(self._scores[copy])
            self.finished.append(infos[copy]["score"])
            self._scores[copy] = 0
        for copy in np.flatnonzero(result.truncated):
            # Keys by which Stable-Baselines3 recognizes a truncated game.
            infos[copy]["TimeLimit.truncated"] = True
            infos[copy]["terminal_observation"] = None if result.last is None else result.last[copy]
        rewards = np.sign(result.rewards) if self.clip_rewards else result.rewards
        return result.frames, rewards.astype(np.float32), result.ended, infos

    @contextmanager
    def _name_failures(self) -> Iterator[None]:
        """Convert an exception of the game to an error that names the game."""
        try:
            yield
        except Exception as error:
            raise GameError(f"the game {self.name} failed: {error!r}") from error

    def close(self) -> None:
        """Do nothing, since games hold no resources."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return the render mode, None; copies have no other attributes."""
        if attr_name == "render_mode":
            return [None] * self.num_envs
        raise AttributeError(f"copies of a game have no {attr_name!r}")

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Raise an AttributeError, since copies have no attributes."""
        self.get_attr(attr_name)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Raise an AttributeError, since copies have no methods."""
        return self.get_attr(method_name)

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        """Return False for each copy."""
        return [False] * self.num_envs


def make_stream(
    benchmark: str,
    games: str,
    known: Sequence[str],
    inputs: tuple[int, ...],
    make: Callable[[str, int, int], GameEnv],
) -> GameStream:
    """Create a stream of games.

    Args:
        benchmark: Name of the benchmark, for the scores of its games.
        games: Names of the games, separated by commas.
        known: Names of all games.
        inputs: Shape of an observation.
        make: Function `make(name, copies, threads)` that creates copies of a game.
    """
    scales = scores(benchmark)
    tasks = []
    for name in parse_games(games, known):
        scale = Scale(**scales[name]) if name in scales else None
        # The number of actions is known only once an environment exists.
        tasks.append(GameTask(name, make(name, 1, 1).actions, partial(make, name), scale))
    return GameStream(inputs, tasks)


def parse_games(games: str, known: Sequence[str]) -> list[str]:
    """Split names that are separated by commas.

    Raises:
        UnknownName: There is no such game; the message has the nearest names.
    """
    names = [name.strip() for name in games.split(",")]
    for name in names:
        if name not in known:
            raise UnknownName(unknown("game", name, known))
    return names
