"""Play one game after another.

An agent of Stable-Baselines3 learns Space Invaders and then Breakout of MinAtar, games of ten by ten pixels, with PPO.
Actor and critic are shared by both games. A callback protects the first game while the second one is learned:
`callback=GradientMemoryCallback(memory)` is all that is added. It updates the memory from observations of the last
rollout of a game. Threshold, alpha and the number of observations are those of the paper for games.

With so little training, one seed cannot distinguish the effect of the memory from chance: in some trials with other
seeds and settings the agent lost as little of the first game without it. Over three games of 200,000 steps and three
seeds the difference is large: [results](../../results/README.md#minatar).

    pip install "sgp-torch[rl,minatar]"
"""

from typing import Any

import gymnasium
import numpy as np
from minatar import Environment
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

import sgp
from examples.gallery.figure import draw
from sgp.integrations.stable_baselines3 import GradientMemoryCallback

GAMES, STEPS, EVERY, ROUNDS = ("space_invaders", "breakout"), 65536, 16384, 40


class Game(gymnasium.Env[np.ndarray, int]):
    """A game of MinAtar, with six channels and all six actions in every game."""

    observation_space = gymnasium.spaces.Box(0, 1, (600,), np.float32)
    action_space = gymnasium.spaces.Discrete(6)

    def __init__(self, name: str) -> None:
        self.game = Environment(name)

    def observe(self) -> np.ndarray:
        state = self.game.state()
        return np.pad(state, ((0, 0), (0, 0), (0, 6 - state.shape[2]))).astype(np.float32).ravel()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        if seed is not None:
            self.game.seed(seed)
        self.game.reset()
        self.left = 1000
        return self.observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward, over = self.game.act(int(action))
        self.left -= 1
        return self.observe(), float(reward), bool(over), self.left == 0, {}


def play(agent: PPO, name: str) -> float:
    """Return the mean score of some rounds."""
    games, total = DummyVecEnv([lambda: Game(name)] * ROUNDS), 0.0
    games.seed(3)
    seen, running = games.reset(), np.ones(ROUNDS, dtype=bool)
    while running.any():
        seen, rewards, over, _ = games.step(agent.predict(seen)[0])
        total += float(rewards[running].sum())
        running &= ~over
    return total / ROUNDS


class Test(BaseCallback):
    """Callback that plays all games from time to time."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[list[float]] = []

    def _on_step(self) -> bool:
        if self.num_timesteps % EVERY == 0:
            self.scores.append([play(self.model, name) for name in GAMES])
        return True


def learn(protect: bool) -> list[list[float]]:
    """Learn all games, and return the scores before learning and from time to time."""
    games = [DummyVecEnv([lambda name=name: Game(name)] * 16) for name in GAMES]
    agent = PPO(
        "MlpPolicy",
        games[0],
        n_steps=128,
        batch_size=256,
        n_epochs=4,
        learning_rate=1e-3,
        ent_coef=0.01,
        gamma=0.97,
        policy_kwargs={"net_arch": [256]},
        seed=1,
        device="cpu",
    )
    memory = sgp.GradientMemory(agent.policy, threshold=0.995, alpha=25)  # as the paper for games
    test = Test()
    test.scores.append([play(agent, name) for name in GAMES])
    for game in games:
        game.seed(2)
        agent.set_env(game)
        agent.learn(STEPS, callback=[test, GradientMemoryCallback(memory, samples=1984)] if protect else test)
    return test.scores


if __name__ == "__main__":
    per_game = STEPS // EVERY
    draw(
        "minatar_games",
        {"finetuning": learn(protect=False), "SGP": learn(protect=True)},
        tasks={name.replace("_", " "): (i * per_game, (i + 1) * per_game) for i, name in enumerate(GAMES)},
        score="mean score",
        time=f"{EVERY:,} steps each",
        decimals=1,
    )
