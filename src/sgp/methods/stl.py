"""STL, single-task learning: a network of its own for each task, so that nothing is shared and nothing forgotten."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sgp.methods.method import Batch, Method, NoSettings, clone_tensors, sum_bytes
from sgp.methods.settings import STLFacts

Weights = dict[str, Tensor]


class STL(STLFacts, Method[NoSettings]):
    """Trains the one network anew for each task, and stores the weights of earlier tasks.

    Every task starts from the network's first weights, because a method does not know how a network initializes its
    weights. So each task is learned as if it were the only one.
    """

    state_names = ("_head", "_first", "_earlier")

    def __init__(self, network: nn.Module, settings: NoSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self._first = clone_tensors(network.state_dict())
        # By head; the network itself has the weights of the last task.
        self._earlier: dict[str, Weights] = {}
        self._head: int | None = None

    def begin_task(self, head: int, batches: Iterable[Batch]) -> None:
        if self._head is not None:
            self._earlier[str(self._head)] = clone_tensors(self.network.state_dict())
        self._earlier.pop(str(head), None)
        self._head = head
        self.network.load_state_dict(self._first)

    def compute_logits(self, inputs: Tensor, head: int) -> Tensor:
        if str(head) not in self._earlier:
            return super().compute_logits(inputs, head)
        return self.run_with(self._earlier[str(head)], inputs, head)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._first = self._match_memory_format(self._first)
        self._earlier = {head: self._match_memory_format(weights) for head, weights in self._earlier.items()}

    def _match_memory_format(self, weights: Weights) -> Weights:
        """Store weights like the network's own: a convolution of another memory format may round differently."""
        own = self.network.state_dict()
        return {name: torch.empty_like(own[name]).copy_(weight) for name, weight in weights.items()}

    def count_bytes(self) -> dict[str, int]:
        return {"weights": sum_bytes(self._earlier), "first weights": sum_bytes(self._first)}

    def compute_capacity(self) -> float:
        return 100.0 * (len(self._earlier) + 1)
