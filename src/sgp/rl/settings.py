"""Settings of PPO on a stream of games, which need no package of reinforcement learning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sgp.settings import Settings, setting


class GameError(RuntimeError):
    """A game cannot be started, or failed."""


@dataclass(frozen=True)
class PPOSettings(Settings):
    """Training on each game by PPO of Stable-Baselines3, with a new Adam for each game."""

    steps: int = setting(10_000_000, low=1)
    """Steps of the agent in each game; a step in Atari is four frames."""
    envs: int = setting(16, low=1)
    """Number of copies of the game that are played at once."""
    rollout: int = setting(125, low=1)
    """Steps in each copy between two updates."""
    # The advantages of a single state have no deviation.
    batch: int = setting(250, low=2)
    """States per gradient step."""
    epochs: int = setting(4, low=1)
    """Passes over the states of an update."""
    lr: float = setting(2.5e-4, above=0)
    """Learning rate at the start of each game, which decays linearly to 0."""
    adam_eps: float = setting(1e-5, above=0)
    """Epsilon of Adam; Algorithm 2 has 1e-8."""
    gamma: float = setting(0.99, low=0, high=1)
    """Discount factor of later rewards."""
    gae_lambda: float = setting(0.95, low=0, high=1)
    """Lambda of generalized advantage estimation."""
    clip_range: float = setting(0.1, above=0)
    """Clipping range of the policy's ratio."""
    clip_values: float | None = setting(0.1, above=0, high=math.inf)
    """Clipping range of the values; none: no clipping."""
    value_weight: float = setting(0.25, low=0)
    """Weight of the value loss, a mean of squares; the published 0.5 is a weight of half the mean."""
    entropy_weight: float = setting(0.01, low=0)
    """Weight of the policy's entropy, which rewards exploration."""
    max_norm: float = setting(0.5, above=0)
    """Maximum norm of the gradient."""
    advantages: Literal["batch", "rollout"] = "batch"
    """Set of states over which advantages are standardized. batch: those of a gradient step; rollout: all of an update,
    as published."""
    optimizer: Literal["adam-gp", "adam-on-projected"] = "adam-gp"
    """Combination of Adam and a projecting method. adam-gp: Adam's step is projected (Algorithm 2); adam-on-projected:
    Adam is given a projected gradient, which forgets (appendix E)."""
    adam_counter: Literal["step", "update"] = "step"
    """Counter of Adam's bias correction. step: gradient steps; update: updates, as in the published Adam-GP."""
    patches: Literal["strided", "corner"] = "strided"
    """Patches of a convolution's input from which a memory is updated. strided: those of the convolution; corner: as
    many in steps of one from the upper left corner, as published."""
    states: int = setting(1984, low=1)
    """States of a game's last update from which a method is updated."""
    evaluate_every: int = setting(100, low=1)
    """Updates between two evaluations; each also writes a checkpoint and starts new episodes."""
    evaluation_games: int = setting(10, low=1)
    """Games that an evaluation plays of each task, all at once."""
    evaluation_counts: Literal["first", "each"] = "first"
    """Games that an evaluation counts. first: the games that end first, as published, which favours short ones; each:
    the first game of each copy."""

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
        """Number of updates in each game; an incomplete last one is left out, as published."""
        return self.steps // self.update_steps
