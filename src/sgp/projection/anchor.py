"""The weights of a model as of the last update, to compare with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from sgp.projection.sharded import gather_whole


class Anchor(Mapping[str, Tensor]):
    """Parameters and buffers of a model at one moment, by name.

    Args:
        tensors: Copies of the parameters and buffers.
        protected: Names of the parameters that a memory protects or freezes.
    """

    def __init__(self, tensors: Mapping[str, Tensor], protected: frozenset[str]) -> None:
        self._tensors = dict(tensors)
        self.protected = protected

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def list_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name. Unlike a state dict this runs no hooks."""
    parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


def copy_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's parameters and buffers by name."""
    return {name: value.detach().clone() for name, value in list_tensors(model).items()}


def has_grown(then: Tensor, now: Tensor) -> bool:
    """Return whether a parameter has more rows than it had, as where a vocabulary has grown."""
    return then.dim() > 0 and then.shape[1:] == now.shape[1:] and len(then) < len(now)


def extend_rows(then: Tensor, now: Tensor) -> Tensor:
    """Return an earlier value of a parameter with the rows that it has gained since, as they are now."""
    if not isinstance(then, Tensor) or not has_grown(then, now):
        return then
    return torch.cat([gather_whole(then).to(now), gather_whole(now)[len(then) :]])
