"""Stable-Baselines3's PPO on one game of an agent that plays several games."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from stable_baselines3 import PPO
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor
from torch.optim import Adam

from sgp.networks.actor_critic import ActorCritic
from sgp.rl.adam import AdamByUpdate
from sgp.rl.games import Frames, GameEnv
from sgp.rl.settings import PPOSettings

# Term in the denominator of standardized advantages of a rollout, as published.
ADVANTAGE_EPS = 1e-5


class SharedTrunk(BaseFeaturesExtractor):
    """Trunk of a network, which the policies of all games share."""

    def __init__(self, observation_space: Space[Any], network: ActorCritic, game: int) -> None:
        super().__init__(observation_space, features_dim=network.trunk.shape.features)
        self.trunk = network.trunk

    def forward(self, observations: Tensor) -> Tensor:
        """Compute the input of the heads, [n, features]."""
        features: Tensor = self.trunk(observations)
        return features


class GamePolicy(ActorCriticPolicy):
    """Policy of one game: the shared trunk, and the game's own actor and critic.

    All weights are the network's, with the network's initialization. The optimizer holds those of this game and of
    the trunk.
    """

    def _build(self, lr_schedule: Callable[[float], float]) -> None:
        network, game = self.features_extractor_kwargs["network"], self.features_extractor_kwargs["game"]
        self._build_mlp_extractor()  # without layers
        self.action_net, self.value_net = network.actors[game], network.critics[game]
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)


class Agent(PPO):
    """PPO on one game.

    Args:
        network: Network that plays all games.
        game: Index of the game's actor and critic.
        env: Copies of the game.
        training: Settings of PPO.
        updated: Callback that is invoked after each update.

    Attributes:
        played: Time at which the states of the last update had been played, by `time.perf_counter`.
    """

    def __init__(
        self, network: ActorCritic, game: int, env: GameEnv, training: PPOSettings, updated: Callable[[Agent], None]
    ) -> None:
        self.training = training
        self.updated = updated
        self.played = 0.0
        super().__init__(
            GamePolicy,
            env,
            learning_rate=lambda remaining: self.lr,
            n_steps=training.rollout,
            batch_size=training.batch,
            n_epochs=training.epochs,
            gamma=training.gamma,
            gae_lambda=training.gae_lambda,
            clip_range=training.clip_range,
            clip_range_vf=training.clip_values,
            normalize_advantage=training.advantages == "batch",
            ent_coef=training.entropy_weight,
            vf_coef=training.value_weight,
            max_grad_norm=training.max_norm,
            device=next(network.parameters()).device,
            policy_kwargs={
                "features_extractor_class": SharedTrunk,
                "features_extractor_kwargs": {"network": network, "game": game},
                "net_arch": [],
                "normalize_images": False,  # the trunk does
                "optimizer_class": AdamByUpdate if training.adam_counter == "update" else Adam,
                "optimizer_kwargs": {"eps": training.adam_eps},
            },
        )

    @property
    def update(self) -> int:
        """Number of the update whose states are used for training, from 1."""
        return max(1, int(self.num_timesteps) // self.training.update_steps)

    @property
    def lr(self) -> float:
        """Learning rate of the update."""
        # Not from Stable-Baselines3's remaining progress, which is 0 at the last update already.
        return self.training.lr * (1 - (self.update - 1) / self.training.updates)

    def train(self) -> None:
        """Train on the states of an update."""
        self.played = time.perf_counter()
        if self.training.advantages == "rollout":
            advantages = self.rollout_buffer.advantages
            advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + ADVANTAGE_EPS)
            self.rollout_buffer.advantages = advantages
        if isinstance(self.policy.optimizer, AdamByUpdate):
            self.policy.optimizer.update = self.update
        super().train()
        self.updated(self)

    def run_updates(self, done: int, updates: int) -> None:
        """Start new episodes and train for some updates, after `done` earlier ones."""
        self.num_timesteps = done * self.training.update_steps
        self._last_obs = None
        self.learn(updates * self.training.update_steps, log_interval=None, reset_num_timesteps=False)

    @property
    def observations(self) -> Frames:
        """Current observations, [copies, ...]."""
        return np.asarray(self._last_obs)

    def get_states(self) -> Tensor:
        """Return the observations of the last update, [n, ...]."""
        return torch.from_numpy(self.rollout_buffer.observations)

    def get_losses(self) -> dict[str, float]:
        """Return the losses of the last update, with their names in the metrics of a run."""
        names = {
            "policy_loss": "policy_gradient_loss",
            "value_loss": "value_loss",
            "entropy": "entropy_loss",
            "kl": "approx_kl",
            "clipped": "clip_fraction",
            "explained_variance": "explained_variance",
        }
        losses = {ours: float(self.logger.name_to_value[f"train/{theirs}"]) for ours, theirs in names.items()}
        return losses | {"entropy": -losses["entropy"]}
