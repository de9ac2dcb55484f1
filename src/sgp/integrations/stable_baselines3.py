"""A memory in the algorithms of Stable-Baselines3."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sgp.integrations.optimizers import attach_all
from sgp.projection import GradientMemory, OptimizerHook
from sgp.projection.batches import evaluation_pass, preserve_random_state
from sgp.projection.modes import Mode

try:
    from stable_baselines3.common.callbacks import BaseCallback
except ModuleNotFoundError as error:
    raise ImportError('this needs stable-baselines3: pip install "sgp-torch[rl]"', name="stable_baselines3") from error

Observations = Tensor | dict[str, Tensor]


class GradientMemoryCallback(BaseCallback):
    """One ``learn`` is one task::

        for env in games:
            model.set_env(env)
            model.learn(100_000, callback=GradientMemoryCallback(memory))

    The memory is attached to every optimizer of the policy that holds parameters of its model, and updated when
    learning ends, from what was seen: the last rollout, or the replay buffer.

    Args:
        memory: of ``model.policy`` or of a part of it.
        samples: how many observations the update uses.
        forward: runs a batch of observations; without it the policy does. What it does not reach, such as the critic
            of SAC, needs one.
        update: False leaves the update to you.
        mode: as in ``memory.attach``.
        batch: how many observations at a time.
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
        self.hooks: list[OptimizerHook] = []
        self._seen: Observations | None = None

    def _on_training_start(self) -> None:
        found = (getattr(module, "optimizer", None) for module in self.model.policy.modules())
        self.hooks = attach_all(self.memory, [o for o in found if isinstance(o, Optimizer)], mode=self.mode)
        self._seen = None

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        """Draw from a rollout while it is there: learning may stop in the middle of the next one."""
        buffer = getattr(self.model, "rollout_buffer", None)
        if buffer is not None and self.update:
            self._seen = self._drawn(buffer)

    def _on_training_end(self) -> None:
        if self.update:
            self._update()
        for hook in self.hooks:
            hook.detach()
        self.hooks = []

    def _update(self) -> None:
        policy, seen, self._seen = self.model.policy, self._seen, None
        replay = getattr(self.model, "replay_buffer", None)
        if replay is not None and replay.size() > 0:
            with preserve_random_state():
                seen = replay.sample(self.samples, env=self.model.get_vec_normalize_env()).observations
        if seen is None:
            warnings.warn("learning ended before its first rollout did: the memory is as it was", stacklevel=2)
            return
        with evaluation_pass(policy, ()):  # the memory's model may be a part of it
            self.memory.update(_batches(seen, self.batch), forward=self.forward or policy)

    def _drawn(self, buffer: Any) -> Observations:
        """Some observations of a rollout, [steps, copies, ...], as the policy takes them."""
        with preserve_random_state():
            chosen = torch.randperm(buffer.buffer_size * buffer.n_envs)[: self.samples].numpy()

        def draw(part: Any) -> Tensor:
            return torch.as_tensor(part.reshape(-1, *part.shape[2:])[chosen], device=self.model.device)

        if isinstance(buffer.observations, dict):
            return {name: draw(part) for name, part in buffer.observations.items()}
        return draw(buffer.observations)


def _batches(observations: Observations, size: int) -> list[Any]:
    if isinstance(observations, Tensor):
        return list(torch.split(observations, size))
    parts = [torch.split(part, size) for part in observations.values()]
    return [dict(zip(observations, batch, strict=True)) for batch in zip(*parts, strict=True)]
