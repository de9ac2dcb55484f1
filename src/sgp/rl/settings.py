"""Settings of PPO on a stream of games, which need no package of reinforcement learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class GameError(RuntimeError):
    """A game cannot be started, or failed."""


@dataclass(frozen=True)
class PPOSettings:
    """Training on each game by PPO of Stable-Baselines3, with a new Adam for each game."""

    steps: int = 10_000_000
    """Steps of the agent in each game; a step in Atari is four frames."""
    envs: int = 16
    """Number of copies of the game that are played at once."""
    rollout: int = 125
    """Steps in each copy between two updates."""
    batch: int = 250
    """States per gradient step, at least 2."""
    epochs: int = 4
    """Passes over the states of an update."""
    lr: float = 2.5e-4
    """Learning rate at the start of each game, which decays linearly to 0."""
    adam_eps: float = 1e-5
    """Epsilon of Adam; Algorithm 2 has 1e-8."""
    gamma: float = 0.99
    """Discount factor of later rewards, in [0, 1]."""
    gae_lambda: float = 0.95
    """Lambda of generalized advantage estimation, in [0, 1]."""
    clip_range: float = 0.1
    """Clipping range of the policy's ratio, above 0."""
    clip_values: float | None = 0.1
    """Clipping range of the values, above 0; none: no clipping."""
    value_weight: float = 0.25
    """Weight of the value loss, a mean of squares; the published 0.5 is a weight of half the mean."""
    entropy_weight: float = 0.01
    """Weight of the policy's entropy, which rewards exploration."""
    max_norm: float = 0.5
    """Maximum norm of the gradient, above 0."""
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
    states: int = 1984
    """States of a game's last update from which a method is updated, at least 1."""
    evaluate_every: int = 100
    """Updates between two evaluations; each also writes a checkpoint and starts new episodes."""
    evaluation_games: int = 10
    """Games that an evaluation plays of each task, all at once."""
    evaluation_counts: Literal["first", "each"] = "first"
    """Games that an evaluation counts. first: the games that end first, as published, which favours short ones; each:
    the first game of each copy."""

    def __post_init__(self) -> None:
        whole = ("steps", "envs", "rollout", "epochs", "states", "evaluate_every", "evaluation_games")
        for name in whole:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.batch < 2:  # the advantages of one state have no deviation
            raise ValueError(f"batch must be at least 2, got {self.batch}")
        # Written so that NaN fails too.
        for name in ("lr", "adam_eps", "clip_range", "max_norm"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        if self.clip_values is not None and not self.clip_values > 0:
            raise ValueError(f"clip_values must be above 0 or none, got {self.clip_values}")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        for name in ("value_weight", "entropy_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")
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
