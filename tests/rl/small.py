"""Run small games for tests."""

from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.small import Stop
from rl import signs

from sgp.experiments.callbacks import Callback
from sgp.experiments.config import Config, configure
from sgp.experiments.folder import RunFolder
from sgp.experiments.ppo import PPOTrainer
from sgp.rl import load_games
from sgp.rl.games import GameStream

# Three updates of 32 states in each game, with every phase of a run.
SMALL = {
    "network": "minatar-actor-critic",
    "envs": 4,
    "rollout": 8,
    "batch": 16,
    "epochs": 1,
    "steps": 96,
    "states": 30,
    "lr": 0.01,
    "evaluate_every": 2,
    "evaluation_games": 3,
}
METHODS = {
    "finetune": {},
    "ewc": {"strength": 10, "fisher_batch": 8, "merge": "online", "penalty_step": "explicit"},
    "blip": {"fisher_labels": "true", "fisher_batch": 8},
    "gpm": {"threshold": 0.9, "memory_samples": 30},
    "sgp": {"threshold": 0.9, "memory_samples": 30, "alpha": 5},
}


def small(method: str = "sgp", **settings: Any) -> Config[Any]:
    """Create a config of two games of signs with three updates each."""
    given = SMALL | METHODS[method] | {"threads": torch.get_num_threads()} | settings
    config = configure("signs", method, **given)
    return config


def run(
    path: Path,
    config: Config[Any],
    *callbacks: Callback,
    stream: GameStream | None = None,
    resume: bool = False,
) -> PPOTrainer:
    """Run a config to its end in a folder."""
    with RunFolder.begin(path, config, resume=resume) as folder:
        learner = PPOTrainer(
            config, stream or load_games(config.benchmark, config.benchmark_settings), folder, *callbacks
        )
        learner.run()
    return learner


def run_with_stops(path: Path, config: Config[Any], *stops: tuple[int, int]) -> PPOTrainer:
    """Run a config that is stopped after some updates (task, update), and resume it after each stop."""
    for number, where in enumerate(stops):

        def stop(event: str, values: dict[str, Any], where: tuple[int, int] = where) -> None:
            if event == "update" and (values["task"], values["update"]) == where:
                raise Stop

        with pytest.raises(Stop):
            run(path, config, stop, resume=number > 0)
    return run(path, config, resume=True)


def signs_stream(**settings: Any) -> GameStream:
    return signs.stream(signs.Signs(**settings))
