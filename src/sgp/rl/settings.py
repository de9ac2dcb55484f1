"""Settings of PPO on a stream of games. Nothing here needs a package of reinforcement learning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sgp.settings import Settings, setting


class GameError(RuntimeError):
    """A game cannot be started, or has failed."""


@dataclass(frozen=True)
class PPOSettings(Settings):
    """How each game is learned: PPO as Stable-Baselines3 has it, with a new Adam for each game."""

    steps: int = setting(10_000_000, low=1)
    """Steps of the agent in each game; an Atari step is four frames."""
    envs: int = setting(16, low=1)
    """How many copies of the game are played at once."""
    rollout: int = setting(125, low=1)
    """Steps in each copy between two updates."""
    # The advantages of a single state have no deviation.
    batch: int = setting(250, low=2)
    """States per gradient step."""
    epochs: int = setting(4, low=1)
    """Passes over the states of an update."""
    lr: float = setting(2.5e-4, above=0)
    """Learning rate at the start of each game, from where it falls linearly to 0."""
    adam_eps: float = setting(1e-5, above=0)
    """Epsilon of Adam; Algorithm 2 has 1e-8."""
    gamma: float = setting(0.99, low=0, high=1)
    """Discount of later rewards."""
    gae_lambda: float = setting(0.95, low=0, high=1)
    """Lambda of the generalised advantage estimate."""
    clip_range: float = setting(0.1, above=0)
    """How far the policy's ratio may move in an update before it is clipped."""
    clip_values: float | None = setting(0.1, above=0, high=math.inf)
    """How far a value may move in an update before it is clipped; none: as far as it likes."""
    value_weight: float = setting(0.25, low=0)
    """Of the value loss, a mean of squares; the published 0.5 stands before half of that."""
    entropy_weight: float = setting(0.01, low=0)
    """Of the policy's entropy, which keeps it exploring."""
    max_norm: float = setting(0.5, above=0)
    """Gradients are shortened to this norm."""
    advantages: Literal["batch", "rollout"] = "batch"
    """What advantages are standardised over: the states of a gradient step, or all of an update as published."""
    optimizer: Literal["adam-gp", "adam-on-projected"] = "adam-gp"
    """What a projecting method does with Adam. adam-gp: projects Adam's step (Algorithm 2). adam-on-projected: gives
    Adam a projected gradient, which forgets (appendix E)."""
    adam_counter: Literal["step", "update"] = "step"
    """What Adam's bias correction counts: gradient steps, or updates as the published Adam-GP does."""
    patches: Literal["strided", "corner"] = "strided"
    """Which patches of a convolution's input a memory takes in: those that the convolution sees, or as published as
    many in steps of one from the upper left corner."""
    states: int = setting(1984, low=1)
    """How many states of a game's last update a method takes in."""
    evaluate_every: int = setting(100, low=1)
    """Updates between two evaluations, at each of which a checkpoint is written and new episodes begin."""
    evaluation_games: int = setting(10, low=1)
    """How many games of each kind an evaluation plays, as many at once."""
    evaluation_counts: Literal["first", "each"] = "first"
    """first: the games that end first count, as published, which favours short ones. each: the first game of each
    copy does."""

    def __post_init__(self) -> None:
        """Check the fields, and that batches and states fit the steps of an update."""
        super().__post_init__()
        if self.update_steps % self.batch:
            raise ValueError(
                f"batch must divide the {self.update_steps} states of an update (envs {self.envs} x rollout "
                f"{self.rollout}), got {self.batch}"
            )
        if self.steps < self.update_steps:
            raise ValueError(f"steps must be at least the {self.update_steps} of one update, got {self.steps}")
        if self.states > self.update_steps:
            raise ValueError(f"states must be at most the {self.update_steps} of an update, got {self.states}")

    @property
    def update_steps(self) -> int:
        """Steps of the agent in one update."""
        return self.envs * self.rollout

    @property
    def updates(self) -> int:
        """In each game; steps that do not fill one more are left out, as published."""
        return self.steps // self.update_steps
