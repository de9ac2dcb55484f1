"""Protect an agent of Stable-Baselines3 that learns two games in a row.

python examples/stable_baselines3_games.py    # some seconds on a CPU; needs stable-baselines3
"""

from typing import Any

import gymnasium
import numpy as np
from stable_baselines3 import PPO

import sgp
from sgp.integrations.stable_baselines3 import GradientMemoryCallback

GAMES, ROUNDS = 2, 500
SHARED = np.random.default_rng(99).normal(size=(4, 32))


class Game(gymnasium.Env[np.ndarray, int]):
    """A game of single moves: tell which of four signs is shown. A part of each sign means another one elsewhere."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (32,))
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, game: int) -> None:
        self.signs = 2 * np.roll(SHARED, game, axis=0) + np.random.default_rng(game).normal(size=(4, 32))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.sign = self.np_random.integers(4)
        noise = 0.2 * self.np_random.normal(size=32)
        return (self.signs[self.sign] + noise).astype(np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float(action == self.sign)
        return self.reset()[0], reward, True, False, {}


def compute_reward(agent: PPO, game: int) -> float:
    """Return the mean reward of a round in percent of the highest; chance is 25."""
    env = Game(game)
    observation, _ = env.reset(seed=1)
    total = 0.0
    for _ in range(ROUNDS):
        observation, reward, *_ = env.step(agent.predict(observation, deterministic=True)[0])
        total += reward
    return 100 * total / ROUNDS


def learn_games(protect: bool) -> tuple[float, float]:
    """Return the mean reward after the last game, and how much that of earlier games has changed."""
    settings = {"n_steps": 256, "n_epochs": 5, "learning_rate": 1e-3, "ent_coef": 0.05}
    agent = PPO("MlpPolicy", Game(0), device="cpu", seed=0, **settings)
    callback = GradientMemoryCallback(sgp.GradientMemory(agent.policy, threshold=0.95, alpha=10)) if protect else None
    learned = []
    for game in range(GAMES):
        agent.set_env(Game(game))
        agent.learn(4096, callback=callback)
        learned.append(compute_reward(agent, game))
    final = [compute_reward(agent, game) for game in range(GAMES)]
    return sum(final) / GAMES, (sum(final) - sum(learned)) / (GAMES - 1)


if __name__ == "__main__":
    for name, protect in {"without the memory": False, "with the memory": True}.items():
        print("{:<18}  reward {:5.1f}  BWT {:5.1f}".format(name, *learn_games(protect)))
