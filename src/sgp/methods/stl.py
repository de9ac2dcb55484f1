"""STL, single-task learning: a network of its own for each task, so that nothing is shared and nothing forgotten."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sgp.methods.method import Batch, Method, NoSettings
from sgp.methods.settings.stl import STLFacts

Weights = dict[str, Tensor]


class STL(STLFacts, Method[NoSettings]):
    """Trains the one network anew for each task and stores the weights of the tasks before.

    Every task starts from the same weights, those that the network had at first: a method does not know how a network
    draws its weights, and so a task is learned as it would be if it were the only one.
    """

    def __init__(self, network: nn.Module, settings: NoSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self._first = _copy(network.state_dict())
        # By head; those of the task that was begun last are the network's own.
        self._earlier: dict[int, Weights] = {}
        self._head: int | None = None

    def begin(self, head: int, batches: Iterable[Batch]) -> None:
        if self._head is not None:
            self._earlier[self._head] = _copy(self.network.state_dict())
        self._earlier.pop(head, None)
        self._head = head
        self.network.load_state_dict(self._first)

    def logits(self, inputs: Tensor, head: int) -> Tensor:
        if head not in self._earlier:
            return super().logits(inputs, head)
        out: Tensor = functional_call(self.network, self._earlier[head], (inputs, head))
        return out

    def state_dict(self) -> dict[str, Any]:
        earlier = {str(head): dict(weights) for head, weights in self._earlier.items()}
        return {"head": self._head, "first": dict(self._first), "earlier": earlier}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._head = state["head"]
        self._first = self._laid_out(state["first"])
        self._earlier = {int(head): self._laid_out(weights) for head, weights in state["earlier"].items()}

    def _laid_out(self, weights: Mapping[str, Tensor]) -> Weights:
        """In memory as the network's own are: a convolution of another memory format may round otherwise."""
        own = self.network.state_dict()
        return {name: torch.empty_like(own[name]).copy_(weight) for name, weight in weights.items()}

    def bytes(self) -> dict[str, int]:
        earlier = sum(_size(weights) for weights in self._earlier.values())
        return {"weights": earlier, "first weights": _size(self._first)}

    def capacity(self) -> float:
        return 100.0 * (len(self._earlier) + 1)


def _copy(weights: Mapping[str, Tensor]) -> Weights:
    return {name: weight.detach().clone() for name, weight in weights.items()}


def _size(weights: Mapping[str, Tensor]) -> int:
    return sum(weight.nbytes for weight in weights.values())
