"""An exponential mean of a network's weights over the steps of a task.

The mean lies among the weights that were passed, and each of those differs from the task's first weights by projected
steps only. The projection is linear, so the mean obeys it as well as they do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """The mean of parameters and floating buffers, from the weights as they are now on.

    Args:
        network: whose weights.
        decay: share of the old mean that each step keeps, in (0, 1).
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.decay = decay
        self._live = {name: tensor for name, tensor in network.state_dict().items() if tensor.is_floating_point()}
        self._mean = {name: tensor.clone() for name, tensor in self._live.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step."""
        torch._foreach_lerp_(list(self._mean.values()), list(self._live.values()), 1 - self.decay)

    @torch.no_grad()
    def keep(self) -> None:
        """Make the mean the network's weights."""
        for name, tensor in self._live.items():
            tensor.copy_(self._mean[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The mean as the network's weights for a while; training goes on from its own afterwards."""
        own = {name: tensor.clone() for name, tensor in self._live.items()}
        self.keep()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in self._live.items():
                    tensor.copy_(own[name])

    def state_dict(self) -> dict[str, Tensor]:
        """The mean."""
        return dict(self._mean)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state_dict`."""
        for name, tensor in self._mean.items():
            tensor.copy_(state[name])
