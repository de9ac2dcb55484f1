"""An exponential mean of a network's weights over the steps of a task.

The mean lies among the weights that were passed, and each of those differs from the task's first weights by projected
steps only. The projection is linear, so the mean obeys it as well as they do, and so does a point between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn


class WeightAverage:
    """The mean of parameters and floating buffers after each step; the weights as they are now are no part of it.

    Args:
        network: whose weights.
        decay: share of the old mean that each step keeps, in (0, 1).
        old_share: how much of the way back from the mean to the weights as they are now is gone when it is used.
        new: patterns on names of weights that have no past, which stay as they were learned.
    """

    def __init__(self, network: nn.Module, decay: float, *, old_share: float = 0.0, new: Sequence[str] = ()) -> None:
        self.decay = decay
        self.old_share = old_share
        self._live = {name: tensor for name, tensor in network.state_dict().items() if tensor.is_floating_point()}
        self._mean = {name: tensor.clone() for name, tensor in self._live.items()}
        self._steps = torch.zeros((), dtype=torch.int64)
        with_past = [name for name in self._live if old_share and not any(fnmatchcase(name, each) for each in new)]
        self._old = {name: self._live[name].clone() for name in with_past}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step."""
        self._steps += 1
        # All steps so far weigh 1 - decay^steps together: divided by that, the mean is of them alone, however few.
        share = (1 - self.decay) / (1 - self.decay ** int(self._steps))
        torch._foreach_lerp_(list(self._mean.values()), list(self._live.values()), share)

    @torch.no_grad()
    def keep(self) -> None:
        """Make the mean the network's weights, with the share of the old ones."""
        for name, tensor in self._live.items():
            tensor.copy_(self._mean[name])
        for name, old in self._old.items():
            self._live[name].lerp_(old, self.old_share)

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

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The mean, of how many steps it is, and the old weights, which no step changes."""
        state = {"average": dict(self._mean), "averaged": {"steps": self._steps}}
        return state | ({"old": dict(self._old)} if self._old else {})

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from a `state_dict`; it may hold more."""
        for own, name in ((self._mean, "average"), ({"steps": self._steps}, "averaged"), (self._old, "old")):
            for key, tensor in own.items():
                tensor.copy_(state[name][key])
