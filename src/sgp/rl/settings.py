"""Settings of PPO on a stream of games. Nothing here needs a package of reinforcement learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class GameError(RuntimeError):
    """A game cannot be started, or has failed."""


@dataclass(frozen=True)
class PPOSettings:
    """How each game is learned: PPO as Stable-Baselines3 has it, with a new Adam for each game."""

    steps: int = 10_000_000
    """Steps of the agent in each game; an Atari step is four frames."""
    envs: int = 16
    """How many copies of the game are played at once."""
    rollout: int = 125
    """Steps in each copy between two updates."""
    batch: int = 250
    """States per gradient step."""
    epochs: int = 4
    """Passes over the states of an update."""
    lr: float = 2.5e-4
    """Learning rate at the start of each game, from where it falls linearly to 0."""
    adam_eps: float = 1e-5
    """Epsilon of Adam; Algorithm 2 has 1e-8."""
    gamma: float = 0.99
    """Discount of later rewards, in [0, 1]."""
    gae_lambda: float = 0.95
    """Lambda of the generalised advantage estimate, in [0, 1]."""
    clip_range: float = 0.1
    """How far the policy's ratio may move in an update before it is clipped, above 0."""
    clip_values: float | None = 0.1
    """How far a value may move in an update before it is clipped, above 0; none: as far as it likes."""
    value_weight: float = 0.25
    """Of the value loss, a mean of squares; the published 0.5 stands before half of that."""
    entropy_weight: float = 0.01
    """Of the policy's entropy, which keeps it exploring."""
    max_norm: float = 0.5
    """Gradients are shortened to this norm, above 0."""
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
    states: int = 1984
    """How many states of a game's last update a method takes in, at least 1."""
    evaluate_every: int = 100
    """Updates between two evaluations, at each of which a checkpoint is written and new episodes begin."""
    evaluation_games: int = 10
    """How many games of each kind an evaluation plays, as many at once."""
    evaluation_counts: Literal["first", "each"] = "first"
    """first: the games that end first count, as published, which favours short ones. each: the first game of each
    copy does."""

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
        """In each game; steps that do not fill one more are left out, as published."""
        return self.steps // self.update_steps
