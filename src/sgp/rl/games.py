"""A stream of games, and how a game is played by Stable-Baselines3: several copies at once, as one environment."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from sgp.registry import UnknownName, unknown
from sgp.rl.settings import GameError

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
# Observations, in whatever numbers the game shows.
Frames = NDArray[Any]


@dataclass(frozen=True)
class Scale:
    """Two scores of a game that a normalised score is 0 and 1 at.

    Attributes:
        random: of an agent that acts at random.
        reference: of an agent that has learned the game.
    """

    random: float
    reference: float

    def normalised(self, score: float) -> float:
        """(score - random) / (reference - random), not clipped: an agent may do better or worse."""
        return (score - self.random) / (self.reference - self.random)


@dataclass(frozen=True)
class GameTask:
    """One game of a stream.

    Attributes:
        name: on the command line and in tables.
        actions: how many the agent has.
        make: `make(copies, threads)` gives copies of it to play.
        scale: of its scores; None if none is known.
    """

    name: str
    actions: int
    make: Callable[[int, int], GameEnv]
    scale: Scale | None = None


@dataclass(frozen=True)
class GameStream:
    """Games in the order in which they are learned.

    Attributes:
        inputs: shape of an observation, the same for all.
        games: themselves.
    """

    inputs: tuple[int, ...]
    games: Sequence[GameTask]

    @property
    def names(self) -> list[str]:
        """Of the games."""
        return [game.name for game in self.games]

    @property
    def actions(self) -> list[int]:
        """How many each game has."""
        return [game.actions for game in self.games]

    def __len__(self) -> int:
        return len(self.games)


@dataclass(frozen=True)
class Played:
    """What a step of all copies has brought.

    Attributes:
        frames: observations after it; in copies whose game is over, the first of the next game.
        rewards: as the game gives them.
        ended: whether an episode of learning has ended: the game is over, or a life is lost where that counts.
        over: whether the game is over.
        cut: whether it was cut off by time.
        last: observations at the end of those games that were cut off.
    """

    frames: Frames
    rewards: Floats
    ended: Flags
    over: Flags
    cut: Flags
    last: Frames | None = None


class GameEnv(VecEnv):
    """Copies of one game, which begin anew by themselves when they are over.

    Scores are sums of the game's own rewards from its beginning to its end. The agent may be given only the sign of
    each reward. A subclass says how the game is begun and played.

    Args:
        name: of the game.
        copies: how many.
        frames: space of the observations.
        actions: how many there are.
        clip_rewards: whether the agent is given the sign of rewards only.

    Attributes:
        actions: how many there are.
        finished: scores of the games that are over, until somebody takes them away.
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
    def begin(self, seeds: Sequence[int | None]) -> Frames:
        """Begin a game in each copy, from its seed if it has one; the observations."""

    @abstractmethod
    def play(self, actions: NDArray[np.int64]) -> Played:
        """Play a step in each copy."""

    def reset(self) -> Frames:
        """Begin new games, with the seeds that were given for it."""
        with self._named():
            frames = self.begin(self._seeds)
        self._scores[:] = 0
        self._reset_seeds()
        return frames

    def step_async(self, actions: NDArray[np.int64]) -> None:
        """Take note of the actions."""
        self._actions = actions

    def step_wait(self) -> tuple[Frames, Floats, Flags, list[dict[str, Any]]]:
        """Play a step with the actions that were noted."""
        with self._named():
            played = self.play(self._actions)
        self._scores += played.rewards
        told: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for copy in np.flatnonzero(played.over):
            told[copy]["score"] = float(self._scores[copy])
            self.finished.append(told[copy]["score"])
            self._scores[copy] = 0
        for copy in np.flatnonzero(played.cut):
            # By these names Stable-Baselines3 knows that the game would have gone on.
            told[copy]["TimeLimit.truncated"] = True
            told[copy]["terminal_observation"] = None if played.last is None else played.last[copy]
        rewards = np.sign(played.rewards) if self.clip_rewards else played.rewards
        return played.frames, rewards.astype(np.float32), played.ended, told

    @contextmanager
    def _named(self) -> Iterator[None]:
        """A game that fails says which it was."""
        try:
            yield
        except Exception as error:
            raise GameError(f"the game {self.name} has failed: {error!r}") from error

    def close(self) -> None:
        """Games hold nothing that must be given back."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """There is nothing to see inside a copy, and no picture of it."""
        if attr_name == "render_mode":
            return [None] * self.num_envs
        raise AttributeError(f"copies of a game have no {attr_name!r}")

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """There is nothing to set."""
        raise AttributeError(f"copies of a game have no {attr_name!r}")

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """There is nothing to call."""
        raise AttributeError(f"copies of a game have no {method_name!r}")

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        """None of them is."""
        return [False] * self.num_envs


def named(games: str, known: Sequence[str]) -> list[str]:
    """Names with commas between them, all of them known.

    Raises:
        UnknownName: one is not; the message has the nearest ones.
    """
    names = [name.strip() for name in games.split(",")]
    for name in names:
        if name not in known:
            raise UnknownName(unknown("game", name, known))
    return names
