"""The paper's agent on a real Atari game, end to end: its steps with finetuning and with SGP, and where time goes.

SGP's memory has the ranks that bench.steps has for a step of the same agent.
"""

import time
from collections import defaultdict
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench import steps
from bench.row import Row
from bench.timing import take_turns
from sgp.methods.gpm import GPM

NEEDED = ("gymnasium", "ale_py", "stable_baselines3", "yaml")
GAME = "boxing"
# Agent steps per second of finetuning on two cores, and the share of them that SGP must reach.
STEPS_PER_SECOND, SHARE = 160, 0.75


def rows(*, rounds: int) -> list[Row]:
    """Seconds per step of the agent; none where games are not installed."""
    if not all(map(find_spec, NEEDED)):
        return []
    found = {method: _Measured(method) for method in ("finetune", "sgp")}
    times = take_turns({method: each.update for method, each in found.items()}, rounds=rounds)
    plain, sgp = (times.median(method) / found[method].steps for method in found)
    parts = {method: each.parts() for method, each in found.items()}
    projection = max(0.0, parts["sgp"]["learning"] - parts["finetune"]["learning"])
    whole = parts["finetune"] | {"projection": projection}
    shares = {part: seconds / sum(whole.values()) for part, seconds in whole.items()}
    met = "reached" if 1 / plain >= STEPS_PER_SECOND else "not reached"
    return [
        Row(
            name="PPO on Atari, per agent step",
            unit="s",
            amounts={"plain": plain, "sgp": sgp},
            against="plain",
            ratio=times.ratio("sgp", to="finetune"),
            goal=1 / SHARE,
            note=f"finetuning {1 / plain:.0f} steps per second ({STEPS_PER_SECOND} {met}), SGP {1 / sgp:.0f}; of SGP's "
            + ", ".join(f"{part} {100 * share:.0f} %" for part, share in shares.items()),
            detail={
                "game": GAME,
                "steps per second": {"finetune": 1 / plain, "sgp": 1 / sgp},
                "shares": shares,
                "ranks": steps.PPO_RANKS,
                "rounds": dict(times.seconds),
            },
        )
    ]


@dataclass
class _Measured:
    """A learner in a later game."""

    method: str
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    done: int = 0

    def __post_init__(self) -> None:
        from sgp.experiments.config import configure
        from sgp.experiments.folder import RunFolder
        from sgp.experiments.ppo import PPOTrainer
        from sgp.rl import load_games
        from sgp.rl.agent import Agent

        config = configure("atari", self.method, games=GAME, threads=torch.get_num_threads())
        self.steps = config.trainer.update_steps
        stream = load_games(config.benchmark, config.benchmark_settings)
        self.learner = PPOTrainer(config, stream, RunFolder(Path()))
        if isinstance(self.learner.method, GPM):
            found = steps.subspaces(self.learner.network, steps.PPO_RANKS, constant=True)
            steps.remember(self.learner.method.memory, found)
        self.agent = Agent(self.learner.network, 0, self._timed_games(), config.trainer, self._updated)
        self.learner.method.attach(self.agent.policy.optimizer)
        self.update()  # so that everything has been allocated once
        self.seconds.clear()

    def _timed_games(self) -> Any:
        """Wrap the environment to measure its own time separately."""
        config = self.learner.config
        env = self.learner.stream.games[0].make(config.trainer.envs, config.threads)
        play = env.play_step

        def timed(actions: Any) -> Any:
            start = time.perf_counter()
            played = play(actions)
            self.seconds["env"] += time.perf_counter() - start
            return played

        env.play_step = timed  # type: ignore[method-assign]
        return env

    def update(self) -> None:
        """One update, from where the last has ended."""
        self.agent.num_timesteps = self.done * self.steps
        self._begun = time.perf_counter()
        self.agent.learn(self.steps, log_interval=None, reset_num_timesteps=False)
        self.done += 1

    def _updated(self, agent: Any) -> None:
        self.seconds["play"] += agent.played - self._begun
        self.seconds["learning"] += time.perf_counter() - agent.played

    def parts(self) -> dict[str, float]:
        """Seconds of all updates by what they were for."""
        return {
            "env": self.seconds["env"],
            "inference": self.seconds["play"] - self.seconds["env"],
            "learning": self.seconds["learning"],
        }
