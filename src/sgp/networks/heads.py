"""Classifiers of a network, one for each task or one for all, and the base class of networks that have them."""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn


class Heads(nn.ModuleList):
    """Linear layers on the same features, of which the current task's is evaluated.

    A single head is shared by all tasks, and `task` is ignored.

    Args:
        features: Number of features.
        classes: Number of classes of each head.
        bias: Whether the heads have biases.
    """

    def __init__(self, features: int, classes: Sequence[int], *, bias: bool = False) -> None:
        if not classes or min(classes) < 1:
            raise ValueError(f"heads must be one or more positive numbers of classes, got {tuple(classes)}")
        super().__init__(nn.Linear(features, count, bias=bias) for count in classes)

    def forward(self, features: Tensor, task: int | Tensor) -> Tensor:
        """Compute the logits of one task's head, [n, classes].

        Args:
            features: Features, [n, features].
            task: Index of the task, or of each example's task, [n]. For examples of several tasks, the logits are those
                of the example's own head, and -inf for classes that only other heads have.
        """
        if isinstance(task, Tensor):
            return self._evaluate_mixed(features, task)
        logits: Tensor = self._get_head(task)(features)
        return logits

    def _get_head(self, task: int) -> nn.Module:
        if len(self) == 1:
            task = 0
        if not 0 <= task < len(self):
            raise IndexError(f"there are {len(self)} heads, from 0; got task {task}")
        return self[task]

    def _evaluate_mixed(self, features: Tensor, tasks: Tensor) -> Tensor:
        parts = [(torch.nonzero(tasks == task).flatten(), int(task)) for task in torch.unique(tasks)]
        own = [(rows, self._get_head(task)(features[rows])) for rows, task in parts]
        logits = features.new_full((len(features), max(part.shape[1] for _, part in own)), -math.inf)
        for rows, part in own:
            columns = torch.arange(part.shape[1], device=rows.device)
            logits = logits.index_put((rows.unsqueeze(1), columns), part)
        return logits


class HeadedNetwork(nn.Module):
    """Base class of networks in which all heads read the same features.

    A subclass sets `heads` and implements `features`.
    """

    heads: Heads

    def features(self, x: Tensor) -> Tensor:
        """Compute the input of the heads, [n, features]. x: [n, ...]."""
        raise NotImplementedError

    def forward(self, x: Tensor, task: int | Tensor = 0) -> Tensor:
        """Compute the logits of one task's head, [n, heads[task]]. x: [n, ...]."""
        logits: Tensor = self.heads(self.features(x), task)
        return logits


def check_shape(network: str, inputs: tuple[int, ...], known: Collection[tuple[int, ...]]) -> None:
    """Raise unless a network, named for the message, supports inputs of this shape."""
    if tuple(inputs) not in known:
        raise ValueError(f"{network} takes inputs of shape {' or '.join(map(str, known))}, got {tuple(inputs)}")
