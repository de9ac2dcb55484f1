"""Learn a stream of games one after another, in a way that can be stopped at any moment and taken up again.

Games are learned in stretches of `evaluate_every` updates. A stretch begins with an evaluation, a checkpoint and new
episodes, and everything random in it is drawn from seeds that depend on the run's seed, the game and the updates done.
An emulator cannot be saved; but since all runs begin new episodes there, one that goes on from a checkpoint repeats
what a run without a stop does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from sgp.experiments.config import GameConfig
from sgp.experiments.evaluation import batches
from sgp.experiments.experiment import Callback, Experiment
from sgp.experiments.folder import RunError, RunFolder
from sgp.experiments.game_summary import write_tables
from sgp.experiments.seeds import generator_for, seed_for
from sgp.experiments.supervised import optimizer_state, restore_optimizer
from sgp.methods import METHODS, Batch
from sgp.networks import NETWORKS
from sgp.networks.actor_critic import ActorCritic
from sgp.rl.agent import Agent
from sgp.rl.evaluate import play_games
from sgp.rl.games import GameEnv, GameStream
from sgp.rl.patches import use_corner_patches
from sgp.rl.settings import GameError

EMPTY: Mapping[str, Any] = {}
# Heads belong to single games and need no protection.
HEADS = ("actors.*", "critics.*")
# States that run through the network at once when a method takes a game in and does not say how many. At most so many
# where it projects, which takes all at once for the sake of BatchNorm: there is none here.
STATES_AT_ONCE = 256


class PPOTrainer(Experiment):
    """One run on games: a network, a method and how far they are.

    Args:
        config: of the run.
        stream: its games.
        folder: where it leaves its traces; with a checkpoint there, the run goes on from it.
        callbacks: are told of every event.
    """

    def __init__(self, config: GameConfig, stream: GameStream, folder: RunFolder, *callbacks: Callback) -> None:
        super().__init__(folder, *callbacks)
        self.config = config
        self.stream = stream
        self.network = build_agent(config, stream)
        self.method = METHODS[config.method](self.network, config.method_settings, exclude=HEADS)
        if config.trainer.optimizer == "adam-on-projected":
            try:
                self.method.project_gradients()
            except ValueError as error:
                raise ValueError(f"optimizer=adam-on-projected: {error}") from error
        self._evaluated: dict[int, GameEnv] = {}
        self._clock = time.perf_counter()

    def run(self) -> None:
        """Learn what is left to learn."""
        progress, parts = self.folder.load() or ({"task": 0}, {})
        if parts:
            self.method.load_state_dict(parts["method"])
            self.network.load_state_dict(parts["network"])
        for position in range(progress["task"], len(self.stream)):
            self.learn(position, progress, parts)
            progress, parts = {}, {}
        write_tables(self.folder)
        self._log("end")

    def learn(self, position: int, progress: Mapping[str, Any] = EMPTY, parts: Mapping[str, Any] = EMPTY) -> None:
        """Learn one game, and let the method take it in.

        Args:
            position: of the game in the stream.
            progress: of a checkpoint inside the game; empty to begin it.
            parts: of the same checkpoint.
        """
        training = self.config.trainer
        env = self.stream.games[position].make(training.envs, self.config.threads)
        agent = Agent(self.network, position, env, training, lambda agent: self._updated(position, agent))
        optimizer: Optimizer = agent.policy.optimizer
        self.method.attach(optimizer)
        restore_optimizer(optimizer, parts.get("optimizer", {}))
        done: int = progress.get("updates", 0)
        fresh = "updates" not in progress
        while done < training.updates:
            if fresh:
                self._log("evaluation", task=position, update=done, **self._evaluate(position, done))
                self._save(position, updates=done, optimizer=optimizer)
            fresh = True
            stretch = min(training.evaluate_every, training.updates - done)
            with self._seeded("play", position, done):
                env.seed(self._env_seed("games", position, done))
                self._clock = time.perf_counter()
                self._go_on(position, agent, done, stretch)
                self.method.settle()
            done += stretch
        self._finish(position, agent)

    def _go_on(self, position: int, agent: Agent, done: int, updates: int) -> None:
        """Learn for some updates; a policy that is no numbers any more is told as what it is."""
        failure: Exception | None = None
        try:
            agent.run_updates(done, updates)
        except (GameError, RunError):
            raise
        # Of drawing from probabilities that are none; which of them, depends on whether torch validates distributions.
        except (ValueError, RuntimeError) as error:
            failure = error
        # Also where nothing has failed yet: such weights are not for a checkpoint.
        with torch.no_grad():
            policy = self.network(torch.from_numpy(agent.observations), position)
        if not bool(policy.isfinite().all()):
            raise RunError(
                f"the policy is no numbers any more in update {agent.update} of {self.stream.names[position]}: try a "
                f"lower --lr than {self.config.trainer.lr:g}"
            ) from failure
        if failure is not None:
            raise failure

    def _updated(self, position: int, agent: Agent) -> None:
        """An update is done."""
        losses = agent.get_losses()
        env: GameEnv = agent.env
        scores, env.finished = env.finished, []
        now = time.perf_counter()
        self._seconds["play"] += agent.played - self._clock
        self._seconds["learn"] += now - agent.played
        self._clock = now
        self._log(
            "update",
            task=position,
            update=agent.update,
            step=self._step(position, agent.update),
            lr=agent.lr,
            games=len(scores),
            score=float(np.mean(scores)) if scores else None,
            **{name: value if math.isfinite(value) else None for name, value in losses.items()},
        )

    def _step(self, position: int, updates: int) -> int:
        """Steps of the agent in all games so far."""
        training = self.config.trainer
        return (position * training.updates + updates) * training.update_steps

    def _finish(self, position: int, agent: Agent) -> None:
        """Let the method take a game in, and play all that were learned so far."""
        with self._timed("consolidate"), self._seeded("consolidate", position):
            self.consolidate(position, agent.get_states())
        self._log(
            "game",
            task=position,
            name=self.stream.names[position],
            update=self.config.trainer.updates,
            **self._evaluate(position, self.config.trainer.updates),
            free=self.method.free(),
            capacity=self.method.capacity(),
            bytes={"network": sum(p.nbytes for p in self.network.parameters())} | self.method.bytes(),
        )
        # Before the checkpoint, after which a resumed run does not come back here.
        write_tables(self.folder)
        self._save(position + 1)

    def consolidate(self, position: int, states: Tensor) -> None:
        """Give the method states of the last update, with actions that the policy draws for them."""
        order = torch.randperm(len(states), generator=generator_for(self.config.seed, "consolidate", position))
        size = self.method.consolidation_batch or STATES_AT_ONCE
        if self.method.projects_steps:
            size = min(size, STATES_AT_ONCE)
        lots = []
        for rows in batches(order[: self.config.trainer.states], size):
            with torch.no_grad():
                policy = self.network(states[rows], position).softmax(dim=1)
            lots.append((states[rows], torch.multinomial(policy, 1).squeeze(1)))
        self.method.consolidate(lots, self._log_likelihood(position))

    def _log_likelihood(self, position: int) -> Callable[[Batch], Tensor]:
        """log pi(action | state) of one game's policy."""

        def log_likelihood(batch: Batch) -> Tensor:
            states, actions = batch
            return -F.cross_entropy(self.network(states, position), actions, reduction="none")

        return log_likelihood

    def _evaluate(self, position: int, updates: int) -> dict[str, Any]:
        """Mean scores on all games so far, plain and normalised, and the sum of the normalised ones."""
        training = self.config.trainer
        scores, normalised = [], []
        with self._timed("evaluate"):
            for number, game in enumerate(self.stream.games[: position + 1]):
                if number not in self._evaluated:
                    self._evaluated[number] = game.make(training.evaluation_games, self.config.threads)
                found = play_games(
                    self.network,
                    number,
                    self._evaluated[number],
                    games=training.evaluation_games,
                    each=training.evaluation_counts == "each",
                    seed=self._env_seed("evaluation", number),
                )
                scores.append(float(np.mean(found)))
                normalised.append(game.scale.normalize(scores[-1]) if game.scale else None)
        known = [value for value in normalised if value is not None]
        accumulated = sum(known) if len(known) == len(normalised) else None
        return {
            "step": self._step(position, updates),
            "scores": scores,
            "normalised": normalised,
            "accumulated": accumulated,
        }

    def _save(self, position: int, *, updates: int | None = None, optimizer: Optimizer | None = None) -> None:
        """Write a checkpoint: at the start of a game, or at a stretch of it."""
        progress: dict[str, Any] = {"task": position}
        parts: dict[str, dict[str, Any]] = {"network": self.network.state_dict(), "method": self.method.state_dict()}
        if updates is not None:
            progress["updates"] = updates
        if optimizer is not None and optimizer.state:
            parts["optimizer"] = optimizer_state(optimizer)
        with self._timed("checkpoint"):
            self.folder.save(progress, parts)

    def _env_seed(self, use: str, *position: int) -> int:
        """A seed of copies of a game, which count on from it and take 31 bits."""
        return seed_for(self.config.seed, use, *position) % 2**30

    @contextmanager
    def _seeded(self, use: str, *position: int) -> Iterator[None]:
        """Global random numbers of torch and numpy for a use; those of before come back afterwards."""
        seed, numpy = seed_for(self.config.seed, use, *position), np.random.get_state()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            try:
                yield
            finally:
                np.random.set_state(numpy)


def build_agent(config: GameConfig, stream: GameStream) -> ActorCritic:
    """The config's network for a stream of games, with the seed's weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(config.seed, "weights"))
        network = NETWORKS[config.network].build(stream.inputs, stream.actions)
    if not isinstance(network, ActorCritic):
        raise ValueError(f"the network {config.network} has no critics, which games need: try actor-critic")
    if config.trainer.patches == "corner":
        use_corner_patches(network)
    if config.channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network
