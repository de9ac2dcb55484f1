"""Training on a stream of games with Stable-Baselines3's PPO.

Games are learned in stretches of `evaluate_every` updates. A stretch begins with an evaluation, a checkpoint and new
episodes, and everything random in it is drawn from seeds that depend on the run's seed, the game and the updates done.
An emulator cannot be saved; but since all runs begin new episodes there, a run that resumes from a checkpoint repeats
what a run without a stop does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from sgp.experiments.callbacks import Callback
from sgp.experiments.config import Config
from sgp.experiments.evaluation import split_rows
from sgp.experiments.experiment import Experiment
from sgp.experiments.folder import RunError, RunFolder
from sgp.experiments.networks import initialize_network
from sgp.experiments.optimizers import get_optimizer_state, restore_optimizer_state
from sgp.experiments.seeds import derive_seed, make_generator
from sgp.experiments.summary import write_tables
from sgp.methods import METHODS, Method
from sgp.networks.actor_critic import ActorCritic
from sgp.rl.agent import Agent
from sgp.rl.evaluate import play_games
from sgp.rl.games import GameEnv, GameStream
from sgp.rl.patches import use_corner_patches
from sgp.rl.settings import GameError, PPOSettings

# Heads belong to single games and need no protection.
HEADS = ("actors.*", "critics.*")
# Number of states in a batch when a method consolidates a game and has no batch size of its own. Methods that project
# steps get no larger batches either: they ask for all at once because of BatchNorm, which these networks do not have.
STATES_AT_ONCE = 256


class PPOTrainer(Experiment):
    """Train an agent on a stream of games, one after another.

    Args:
        config: Config of the run.
        stream: Games of the run.
        folder: Folder that the run writes to. If it has a checkpoint, the run resumes from it.
        callbacks: Functions that are called for every event.

    Raises:
        ValueError: The config's network, method and trainer do not fit together.
    """

    config: Config[PPOSettings]
    stream: GameStream
    network: ActorCritic

    def __init__(
        self, config: Config[PPOSettings], stream: GameStream, folder: RunFolder, *callbacks: Callback
    ) -> None:
        network = build_agent(config, stream)
        method: Method[Any] = METHODS[config.method](network, config.method_settings, exclude=HEADS)
        if config.trainer.optimizer == "adam-on-projected":
            try:
                method.project_gradients()
            except ValueError as error:
                raise ValueError(f"optimizer=adam-on-projected: {error}") from error
        super().__init__(config, stream, network, method, folder, *callbacks)
        self._evaluation_envs: dict[int, GameEnv] = {}
        self._update_start = time.perf_counter()

    def _learn(self, position: int, progress: Mapping[str, Any], parts: Mapping[str, Any]) -> int:
        agent = self.train(position, progress, parts)
        self._finish_game(position, agent)
        return position + 1

    def train(
        self, position: int, progress: Mapping[str, Any] | None = None, parts: Mapping[str, Any] | None = None
    ) -> Agent:
        """Train on one game, and return its agent.

        Args:
            position: Position of the game in the stream.
            progress: Plain values of a checkpoint inside the game; None at its start.
            parts: Parts with tensors of the same checkpoint.
        """
        trainer = self.config.trainer
        env = self.stream.games[position].make(trainer.envs, self.config.threads)
        agent = Agent(self.network, position, env, trainer, lambda agent: self._end_update(position, agent))
        optimizer: Optimizer = agent.policy.optimizer
        self.method.attach(optimizer)
        done: int = (progress or {}).get("updates", 0)
        resumes = "updates" in (progress or {})
        restore_optimizer_state(optimizer, (parts or {}).get("optimizer", {}))
        while done < trainer.updates:
            if not resumes:
                self._log("evaluation", task=position, update=done, **self._evaluate(position, done))
                self._save_checkpoint(position, done, optimizer)
            resumes = False
            count = min(trainer.evaluate_every, trainer.updates - done)
            with self._seeded("play", position, done):
                env.seed(self._get_env_seed("games", position, done))
                self._update_start = time.perf_counter()
                self._train_updates(position, agent, done, count)
                self.method.finalize_weights()
            done += count
        return agent

    def _train_updates(self, position: int, agent: Agent, done: int, count: int) -> None:
        """Train for some updates, and raise an error that says so if the policy is no longer finite."""
        failure: Exception | None = None
        try:
            agent.run_updates(done, count)
        except (GameError, RunError):
            raise
        # Raised when actions are drawn from NaN; which of them depends on whether torch validates distributions.
        except (ValueError, RuntimeError) as error:
            failure = error
        # Also checked where nothing has failed yet: such weights must not get into a checkpoint.
        with torch.no_grad():
            logits = self.network(torch.from_numpy(agent.observations).to(self.device), position)
        if not bool(logits.isfinite().all()):
            raise RunError(
                f"policy logits became NaN or infinite in update {agent.update} of {self.stream.names[position]}; try "
                f"a lower --lr than {self.config.trainer.lr:g}"
            ) from failure
        if failure is not None:
            raise failure

    def _end_update(self, position: int, agent: Agent) -> None:
        """Log an update."""
        losses = agent.get_losses()
        env: GameEnv = agent.env
        scores, env.finished = env.finished, []
        now = time.perf_counter()
        self._seconds["play"] += agent.played - self._update_start
        self._seconds["learn"] += now - agent.played
        self._update_start = now
        self._log(
            "update",
            task=position,
            update=agent.update,
            step=self._count_steps(position, agent.update),
            lr=agent.lr,
            games=len(scores),
            score=float(np.mean(scores)) if scores else None,
            **{name: value if math.isfinite(value) else None for name, value in losses.items()},
        )

    def _count_steps(self, position: int, updates: int) -> int:
        """Return the agent's steps in all games so far."""
        trainer = self.config.trainer
        return (position * trainer.updates + updates) * trainer.update_steps

    def _finish_game(self, position: int, agent: Agent) -> None:
        """Consolidate a game that was learned, and evaluate all games so far."""
        with self._timed("consolidate"), self._seeded("consolidate", position):
            self.consolidate(position, agent.get_states().to(self.device))
        self._log(
            "game",
            task=position,
            name=self.stream.names[position],
            update=self.config.trainer.updates,
            **self._evaluate(position, self.config.trainer.updates),
            free=self.method.measure_free(),
            capacity=self.method.compute_capacity(),
            bytes=self._measure_bytes(),
        )
        # Before the checkpoint, after which a resumed run does not get here.
        write_tables(self.folder)
        self._save_checkpoint(position + 1)

    def consolidate(self, position: int, states: Tensor) -> None:
        """Update the method's state by states of the last update, with actions that the policy draws for them."""
        order = torch.randperm(len(states), generator=make_generator(self.config.seed, "consolidate", position))
        size = self.method.consolidation_batch or STATES_AT_ONCE
        if self.method.projects_steps:
            size = min(size, STATES_AT_ONCE)
        batches = []
        for rows in split_rows(order[: self.config.trainer.states], size):
            with torch.no_grad():
                policy = self.network(states[rows], position).softmax(dim=1)
            batches.append((states[rows], torch.multinomial(policy, 1).squeeze(1)))
        self.method.consolidate(batches, self._compute_log_likelihood(position))

    def _evaluate(self, position: int, updates: int) -> dict[str, Any]:
        """Return mean scores on all games so far, raw and normalized, and the sum of the normalized scores."""
        trainer = self.config.trainer
        scores, normalized = [], []
        with self._timed("evaluate"):
            for number, game in enumerate(self.stream.games[: position + 1]):
                if number not in self._evaluation_envs:
                    self._evaluation_envs[number] = game.make(trainer.evaluation_games, self.config.threads)
                found = play_games(
                    self.network,
                    number,
                    self._evaluation_envs[number],
                    games=trainer.evaluation_games,
                    each=trainer.evaluation_counts == "each",
                    seed=self._get_env_seed("evaluation", number),
                )
                scores.append(float(np.mean(found)))
                normalized.append(game.scale.normalize(scores[-1]) if game.scale else None)
        known = [value for value in normalized if value is not None]
        return {
            "step": self._count_steps(position, updates),
            "scores": scores,
            "normalised": normalized,
            "accumulated": sum(known) if len(known) == len(normalized) else None,
        }

    def _save_checkpoint(self, position: int, updates: int | None = None, optimizer: Optimizer | None = None) -> None:
        """Write a checkpoint: after some updates of a game, or between two games."""
        progress = {} if updates is None else {"updates": updates}
        parts = {} if optimizer is None or not optimizer.state else {"optimizer": get_optimizer_state(optimizer)}
        with self._timed("checkpoint"):
            self._save(position, progress, parts)

    def _get_env_seed(self, use: str, *position: int) -> int:
        """Return the seed of a game's copies; they count up from it and take 31 bits."""
        return derive_seed(self.config.seed, use, *position) % 2**30


def build_agent(config: Config[PPOSettings], stream: GameStream) -> ActorCritic:
    """Build the config's network for a stream of games, initialized by the run's seed."""
    network = initialize_network(config, stream.inputs, stream.actions)
    if not isinstance(network, ActorCritic):
        raise ValueError(f"the network {config.network} has no critics, which games need: try actor-critic")
    if config.trainer.patches == "corner":
        use_corner_patches(network)
    return network
