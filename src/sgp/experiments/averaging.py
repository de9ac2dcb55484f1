"""Exponential moving average of a network's weights over the steps of a task.

Each averaged weight differs from the task's first weights by projected steps only. The projection is linear, so the
difference between the average and the first weights is projected too, and so is every interpolation between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn


class WeightAverage:
    """Average of parameters and floating-point buffers after each step, without the initial weights.

    Args:
        network: Network whose weights are averaged.
        decay: Factor of the old average in each step, in (0, 1).
        interpolation_weight: Interpolation weight of the initial weights, in [0, 1), when the average is used.
        new: Patterns on names of weights that are new in this task; they are not interpolated.
    """

    def __init__(
        self, network: nn.Module, decay: float, *, interpolation_weight: float = 0.0, new: Sequence[str] = ()
    ) -> None:
        self.decay = decay
        self.interpolation_weight = interpolation_weight
        self._live = {name: tensor for name, tensor in network.state_dict().items() if tensor.is_floating_point()}
        self._mean = {name: tensor.clone() for name, tensor in self._live.items()}
        self._steps = torch.zeros((), dtype=torch.int64)
        with_past = [
            name for name in self._live if interpolation_weight and not any(fnmatchcase(name, each) for each in new)
        ]
        self._old = {name: self._live[name].clone() for name in with_past}

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step to the average."""
        self._steps += 1
        # All steps so far weigh 1 - decay^steps together; the division makes the average unbiased from the start.
        share = (1 - self.decay) / (1 - self.decay ** int(self._steps))
        torch._foreach_lerp_(list(self._mean.values()), list(self._live.values()), share)

    @torch.no_grad()
    def copy_to_network(self) -> None:
        """Replace the network's weights by the average, interpolated with the initial weights."""
        for name, tensor in self._live.items():
            tensor.copy_(self._mean[name])
        for name, old in self._old.items():
            self._live[name].lerp_(old, self.interpolation_weight)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Replace the network's weights by the average inside the context, and restore them afterwards."""
        own = {name: tensor.clone() for name, tensor in self._live.items()}
        self.copy_to_network()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in self._live.items():
                    tensor.copy_(own[name])

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the average, its number of steps, and the initial weights if they are needed."""
        state = {"average": dict(self._mean), "averaged": {"steps": self._steps}}
        return state | ({"old": dict(self._old)} if self._old else {})

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore a `state_dict`; other entries are ignored."""
        for own, name in ((self._mean, "average"), ({"steps": self._steps}, "averaged"), (self._old, "old")):
            for key, tensor in own.items():
                tensor.copy_(state[name][key])
