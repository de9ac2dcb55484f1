"""The classifiers of a network: one for each task, or one that all tasks share."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Heads(nn.ModuleList):
    """Linear layers on the same features, of which one answers.

    With a single head all tasks share it and `task` is ignored.

    Args:
        features: length of the features.
        classes: number of classes of each head.
        bias: whether the heads have biases.
    """

    def __init__(self, features: int, classes: Sequence[int], *, bias: bool = False) -> None:
        if not classes or min(classes) < 1:
            raise ValueError(f"heads must be one or more positive numbers of classes, got {tuple(classes)}")
        super().__init__(nn.Linear(features, count, bias=bias) for count in classes)

    def forward(self, features: Tensor, task: int | Tensor) -> Tensor:
        """The logits [n, classes] of one task's head. features: [n, features].

        For examples of several tasks `task` is the task of each, [n]; the logits are then those of the example's own
        head, and -inf for classes that only other heads have.
        """
        if isinstance(task, Tensor):
            return self._mixed(features, task)
        logits: Tensor = self._head(task)(features)
        return logits

    def _head(self, task: int) -> nn.Module:
        if len(self) == 1:
            task = 0
        if not 0 <= task < len(self):
            raise IndexError(f"there are {len(self)} heads, from 0; got task {task}")
        return self[task]

    def _mixed(self, features: Tensor, tasks: Tensor) -> Tensor:
        parts = [(torch.nonzero(tasks == task).flatten(), int(task)) for task in torch.unique(tasks)]
        own = [(rows, self._head(task)(features[rows])) for rows, task in parts]
        logits = features.new_full((len(features), max(part.shape[1] for _, part in own)), -math.inf)
        for rows, part in own:
            columns = torch.arange(part.shape[1], device=rows.device)
            logits = logits.index_put((rows.unsqueeze(1), columns), part)
        return logits
