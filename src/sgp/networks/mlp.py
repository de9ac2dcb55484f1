"""A multilayer perceptron with one head that all tasks share."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU between them; the last one is the head.

    Args:
        widths: input dimension, hidden widths, number of classes.
        bias: whether the layers have biases.
    """

    def __init__(self, widths: Sequence[int] = (64, 100, 100, 10), *, bias: bool = True) -> None:
        super().__init__()
        if len(widths) < 2 or min(widths) < 1:
            raise ValueError(f"widths must be two or more positive numbers, got {tuple(widths)}")
        *hidden, head = (nn.Linear(inputs, outputs, bias=bias) for inputs, outputs in pairwise(widths))
        self.hidden = nn.ModuleList(hidden)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, classes]. x: [n, ...], flattened to [n, widths[0]]."""
        x = x.flatten(start_dim=1)
        for layer in self.hidden:
            x = layer(x).relu()
        logits: Tensor = self.head(x)
        return logits
