"""Algorithms of Stable-Baselines3 on trivial games."""

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sgp

gymnasium = pytest.importorskip("gymnasium", reason="of the extra 'rl'")
sb3 = pytest.importorskip("stable_baselines3", reason="of the extra 'rl'")
from sgp.integrations.stable_baselines3 import GradientMemoryCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*can hardly learn")


class Signs(gymnasium.Env[Any, Any]):
    """Name the sign of the first input; observations lie in three of 16 directions, which differ between games."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, task: int, *, continuous: bool = False, parts: bool = False) -> None:
        self.directions = np.random.default_rng(task).normal(size=(3, 16))
        self.parts = parts
        box = gymnasium.spaces.Box(-np.inf, np.inf, (16,))
        self.observation_space = gymnasium.spaces.Dict({"seen": box, "again": box}) if parts else box
        if continuous:
            self.action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def _look(self) -> Any:
        self.seen = (self.np_random.normal(size=3) @ self.directions).astype(np.float32)
        return {"seen": self.seen, "again": self.seen} if self.parts else self.seen

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = 8
        return self._look(), {}

    def step(self, action: Any) -> Any:
        right = float((np.asarray(action).item() > 0.5) == (self.seen[0] > 0))
        self.left -= 1
        return self._look(), right, self.left == 0, False, {}


WIDE = {"net_arch": [48]}
PPO = {"n_steps": 32, "batch_size": 16, "n_epochs": 2, "learning_rate": 1e-2, "policy_kwargs": WIDE}
OFF = {"learning_starts": 16, "batch_size": 16, "learning_rate": 1e-2, "buffer_size": 200, "policy_kwargs": WIDE}


def sample_observations(task: int) -> Tensor:
    rows = np.random.default_rng(9).normal(size=(32, 3)) @ Signs(task).directions
    return torch.as_tensor(rows, dtype=torch.float32)


def compute_outputs(model: Any, task: int, part: str) -> Tensor:
    """Return the outputs of a model's policy for the game of a task."""
    policy = model.policy
    with torch.no_grad():
        if part == "policy":
            return torch.cat(
                [
                    policy.get_distribution(sample_observations(task)).distribution.logits,
                    policy.predict_values(sample_observations(task)),
                ],
                1,
            )
        return getattr(policy, part)(sample_observations(task)).clone()


def measure_drift(now: Tensor, then: Tensor) -> float:
    return float((now - then).norm() / then.norm())


@pytest.mark.parametrize(
    ("algorithm", "settings", "part", "continuous"),
    [
        pytest.param("PPO", PPO, "policy", False, id="PPO"),
        pytest.param("A2C", {"n_steps": 32, "learning_rate": 1e-2, "policy_kwargs": WIDE}, "policy", False, id="A2C"),
        pytest.param("DQN", OFF | {"train_freq": 1}, "q_net", False, id="DQN"),
        pytest.param("TD3", OFF, "actor", True, id="TD3"),
    ],
)
def test_outputs_for_the_first_game_do_not_change_while_the_second_is_learned(
    algorithm: str, settings: dict[str, Any], part: str, continuous: bool
) -> None:
    make = getattr(sb3, algorithm)
    model = make("MlpPolicy", Signs(0, continuous=continuous), device="cpu", seed=0, **settings)
    protected = model.policy if part == "policy" else getattr(model.policy, part)
    memory = sgp.GradientMemory(protected, threshold=1.0, alpha=math.inf)
    callback = GradientMemoryCallback(memory, samples=64)
    model.learn(64, callback=callback)
    assert memory.tasks == 1
    old, new = compute_outputs(model, 0, part), compute_outputs(model, 1, part)
    model.set_env(Signs(1, continuous=continuous))
    model.get_env().seed(0)  # otherwise the observations differ between runs
    model.learn(64, callback=callback)
    assert memory.tasks == 2
    assert callback.hooks == []
    # The test observations are similar to the training observations, but not the same.
    assert measure_drift(compute_outputs(model, 0, part), old) < 0.01
    assert measure_drift(compute_outputs(model, 1, part), new) > 0.05
    model.learn(64)  # without the callback nothing is protected
    assert measure_drift(compute_outputs(model, 0, part), old) > 0.05


def test_observations_may_be_dicts() -> None:
    model = sb3.PPO("MultiInputPolicy", Signs(0, parts=True), device="cpu", seed=0, **PPO)
    memory = sgp.GradientMemory(model.policy, threshold=0.99)
    model.learn(32, callback=GradientMemoryCallback(memory, samples=20, batch=16))
    assert memory.tasks == 1


def test_an_update_does_not_change_the_random_state() -> None:
    weights = []
    for update in (True, False):
        model = sb3.PPO("MlpPolicy", Signs(0), device="cpu", seed=0, **PPO)
        memory = sgp.GradientMemory(model.policy, threshold=0.99)
        model.learn(64, callback=GradientMemoryCallback(memory, samples=20, update=update))
        model.learn(32)
        weights.append(model.policy.state_dict())
        assert memory.tasks == update
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


class Stop(sb3.common.callbacks.BaseCallback):
    """Callback that ends learning after some steps."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def _on_step(self) -> bool:
        return self.num_timesteps < self.after


def test_an_update_follows_learning_that_stops_within_a_rollout() -> None:
    model = sb3.PPO("MlpPolicy", Signs(0), device="cpu", seed=0, **PPO)
    memory = sgp.GradientMemory(model.policy, threshold=0.99)
    model.learn(64, callback=[GradientMemoryCallback(memory), Stop(33)])
    assert memory.tasks == 1
    callback = GradientMemoryCallback(memory)
    with pytest.warns(UserWarning, match="before the first rollout was complete"):
        model.learn(64, callback=[callback, Stop(33 + 5)], reset_num_timesteps=False)
    assert memory.tasks == 1
    assert callback.hooks == []


def test_a_policy_of_another_model_is_refused() -> None:
    memory = sgp.GradientMemory(sb3.PPO("MlpPolicy", Signs(0), device="cpu", **PPO).policy, threshold=0.9)
    with pytest.raises(ValueError, match="holds none of the model's parameters"):
        sb3.PPO("MlpPolicy", Signs(0), device="cpu", **PPO).learn(8, callback=GradientMemoryCallback(memory))


def test_the_logger_receives_capacity_leak_and_drift(tmp_path: Path) -> None:
    model = sb3.PPO("MlpPolicy", Signs(0), device="cpu", seed=0, **PPO)
    memory = sgp.GradientMemory(model.policy, threshold=0.95, alpha=5.0)
    rows = []
    for task in range(2):
        model.set_logger(sb3.common.logger.configure(str(tmp_path / f"{task}"), ["csv", "stdout"]))
        model.set_env(Signs(task))
        model.learn(64, callback=GradientMemoryCallback(memory, samples=64, check=[sample_observations(0)]))
        model.logger.close()
        with (tmp_path / f"{task}" / "progress.csv").open(encoding="utf-8", newline="") as lines:
            rows.append([row for row in csv.DictReader(lines) if row["sgp/free/action_net"]])
    first, second = rows
    free = [float(row["sgp/free/action_net"]) for row in first + second]
    assert free[0] == 1
    assert free[1] == free[2] > free[3] > 0
    assert [row["time/total_timesteps"] for row in first] == ["32", "64"]
    assert 0.95 <= float(first[1]["sgp/captured/mlp_extractor.policy_net.0"]) <= 1
    assert not [name for name in first[1] if "drift" in name]
    assert float(second[1]["sgp/leak/action_net"]) < 1e-4
    assert 0 < float(second[1]["sgp/output_drift"]) < 1
