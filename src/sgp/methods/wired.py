"""Base class of methods that assign a network's units to tasks, and helpers for the layers that units feed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sgp.methods.method import Batch, Method, S, clone_tensors
from sgp.networks.wiring import Layer, Wiring, find_wiring, get_layer

Tensors = dict[str, Tensor]


class WiredMethod(Method[S]):
    """Base class of methods that know which units feed which layers, and run each old task with its own tensors.

    Attributes:
        wiring: Wiring of the network; empty before the first task.
        own: Tensors of each learned task, by the task's head.
    """

    def __init__(self, network: nn.Module, settings: S, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.wiring = Wiring({})
        self.own: dict[str, Tensors] = {}
        self._current = ""

    @abstractmethod
    def _set_wiring(self, wiring: Wiring) -> None:
        """Set the wiring and the attributes derived from it."""

    def _get_layer(self, name: str) -> Layer:
        return get_layer(self.network, name)

    def _get_task_tensors(self, head: str) -> Tensors:
        """Return the tensors that replace those of the network for an old task."""
        return self.own[head]

    def compute_logits(self, inputs: Tensor, head: int) -> Tensor:
        if str(head) == self._current or str(head) not in self.own:
            return super().compute_logits(inputs, head)
        return self.run_with(self._get_task_tensors(str(head)), inputs, head)

    def state_dict(self) -> dict[str, Any]:
        return {"wiring": self.wiring.to_dict(), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["wiring"] and not self.wiring.places:
            self._set_wiring(Wiring.from_dict(state["wiring"]))
        super().load_state_dict(state)

    def _clone_norm_buffers(self) -> Tensors:
        """Return a copy of the stored BatchNorm statistics."""
        norms = [name for name, module in self.network.named_modules() if isinstance(module, _BatchNorm)]
        buffers = {name: each for name, each in self.network.named_buffers() if name.rpartition(".")[0] in norms}
        return clone_tensors(buffers)


def wire_network(network: nn.Module, batches: Iterable[Batch], head: int, exclude: Sequence[str]) -> Wiring:
    """Find the wiring of a network by running it for one head on examples of a task."""
    return find_wiring(network, take_two(batches), head, exclude=exclude)


def take_two(batches: Iterable[Batch]) -> Tensor:
    """Return two inputs of a task, since BatchNorm cannot normalize one; a single input is repeated."""
    inputs, _ = next(iter(batches))
    return torch.cat([inputs[:2], inputs[:2]])[:2]


def count_groups(layer: Layer) -> int:
    """Return the number of groups of a convolution; a linear layer has one."""
    return layer.groups if isinstance(layer, nn.Conv2d) else 1


def pair_masks(layer: Layer, units: Tensor, inputs: Tensor) -> Tensor:
    """Return the minimum of the masks of each weight's unit and input, in a shape that multiplies the layer's weight.

    Args:
        layer: Layer that the weights belong to.
        units: Mask of the layer's units, [units].
        inputs: Mask of the layer's inputs, [inputs].
    """
    groups = count_groups(layer)
    # The units of a group see the inputs of their group.
    pairs = torch.minimum(units.view(groups, -1, 1), inputs.view(groups, 1, -1)).reshape(len(units), -1)
    return pairs.reshape(*pairs.shape, *[1] * (layer.weight.dim() - 2))
