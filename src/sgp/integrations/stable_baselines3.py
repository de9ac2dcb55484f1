"""Callback for the algorithms of Stable-Baselines3."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sgp.integrations.optimizers import attach_all
from sgp.integrations.reference import find_reference, list_batches
from sgp.integrations.tracking import collect_capacity, collect_changes, collect_update
from sgp.projection import GradientMemory, OptimizerHook
from sgp.projection.batches import evaluation_pass, preserve_random_state
from sgp.projection.modes import Mode

try:
    from stable_baselines3.common.callbacks import BaseCallback
except ModuleNotFoundError as error:
    raise ImportError('this needs stable-baselines3: pip install "sgp-torch[rl]"', name="stable_baselines3") from error

Observations = Tensor | dict[str, Tensor]


class GradientMemoryCallback(BaseCallback):
    """Callback that protects earlier tasks while an algorithm learns the next one; each ``learn`` is one task.

    ::

        for env in games:
            model.set_env(env)
            model.learn(100_000, callback=GradientMemoryCallback(memory))

    The memory is attached to every optimizer of the policy that has parameters of its model. When learning ends, it is
    updated from observations of the last rollout or of the replay buffer. The algorithm's logger receives free capacity
    and captured energy of each group of layers when learning begins and ends, for TensorBoard and CSV but not the
    terminal.

    Args:
        memory: Memory of ``model.policy`` or of a part of it.
        samples: Number of observations that the update uses.
        forward: Function that runs a batch of observations; None to run the policy. Modules that the policy's forward
            does not run, such as the critic of SAC, need one.
        update: Whether to update the memory; if False, call ``memory.update`` yourself.
        mode: Projection mode, as in ``memory.attach``.
        batch: Number of observations in a batch of the update.
        verbose: Verbosity, as in ``BaseCallback``.
        check: Batches of observations of earlier games, on which leak and drift since the last update are measured and
            logged when learning ends. A batch costs three forward passes.

    Raises:
        TypeError: ``check`` is a single batch.
        ValueError: ``samples`` is below 1.
    """

    def __init__(
        self,
        memory: GradientMemory,
        *,
        samples: int = 1024,
        forward: Callable[[Any], Any] | None = None,
        update: bool = True,
        mode: Mode = "auto",
        batch: int = 256,
        verbose: int = 0,
        check: Iterable[Any] = (),
    ) -> None:
        super().__init__(verbose)
        if samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}")
        self.memory = memory
        self.samples = samples
        self.forward = forward
        self.update = update
        self.mode = mode
        self.batch = batch
        self.check = list_batches(check)
        self.hooks: list[OptimizerHook] = []
        self._observations: Observations | None = None

    def _on_training_start(self) -> None:
        found = (getattr(module, "optimizer", None) for module in self.model.policy.modules())
        self.hooks = attach_all(self.memory, [o for o in found if isinstance(o, Optimizer)], mode=self.mode)
        self._observations = None
        find_reference(self.memory, (), self.check)  # raises now and not after learning
        self._record(collect_capacity(self.memory))

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        """Sample from every complete rollout, since learning may stop in the middle of the next one."""
        buffer = getattr(self.model, "rollout_buffer", None)
        if buffer is not None and self.update:
            self._observations = self._sample(buffer)

    def _on_training_end(self) -> None:
        if self.check and self.memory.tasks:
            with evaluation_pass(self.model.policy, ()):
                forward = self.forward or self.model.policy
                self._record(collect_changes(self.memory, self.check, forward=forward))
        if self.update:
            self._update()
        for hook in self.hooks:
            hook.detach()
        self.hooks = []
        # No algorithm writes what is recorded after its last iteration. The terminal warns of a table without rows.
        self.logger.record("time/total_timesteps", self.num_timesteps, exclude="tensorboard")
        self.logger.dump(self.num_timesteps)

    def _record(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            # Tables in the terminal shorten names, and raise an error if two become equal.
            self.logger.record(name, value, exclude=("stdout", "log"))

    def _update(self) -> None:
        policy, observations, self._observations = self.model.policy, self._observations, None
        replay = getattr(self.model, "replay_buffer", None)
        if replay is not None and replay.size() > 0:
            with preserve_random_state():
                observations = replay.sample(self.samples, env=self.model.get_vec_normalize_env()).observations
        if observations is None:
            warnings.warn("learning ended before the first rollout was complete: no update", stacklevel=2)
            return
        with evaluation_pass(policy, ()):  # the memory's model may be a part of it
            report = self.memory.update(_split_batches(observations, self.batch), forward=self.forward or policy)
        self._record(collect_update(self.memory, report))

    def _sample(self, buffer: Any) -> Observations:
        """Return random observations of a rollout, [steps, environments, ...], in the form that the policy takes."""
        with preserve_random_state():
            chosen = torch.randperm(buffer.buffer_size * buffer.n_envs)[: self.samples].numpy()

        def draw(part: Any) -> Tensor:
            return torch.as_tensor(part.reshape(-1, *part.shape[2:])[chosen], device=self.model.device)

        if isinstance(buffer.observations, dict):
            return {name: draw(part) for name, part in buffer.observations.items()}
        return draw(buffer.observations)


def _split_batches(observations: Observations, size: int) -> list[Any]:
    if isinstance(observations, Tensor):
        return list(torch.split(observations, size))
    parts = [torch.split(part, size) for part in observations.values()]
    return [dict(zip(observations, batch, strict=True)) for batch in zip(*parts, strict=True)]
