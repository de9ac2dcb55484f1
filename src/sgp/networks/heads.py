"""The classifiers of a network: one for each task, or one that all tasks share."""

from collections.abc import Sequence

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

    def forward(self, features: Tensor, task: int) -> Tensor:
        """The logits [n, classes] of one task's head. features: [n, features]."""
        if len(self) == 1:
            task = 0
        if not 0 <= task < len(self):
            raise IndexError(f"there are {len(self)} heads, from 0; got task {task}")
        logits: Tensor = self[task](features)
        return logits
