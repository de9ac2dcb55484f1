"""A multilayer perceptron."""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from sgp.networks.heads import HeadedNetwork, Heads


class MLP(HeadedNetwork):
    """Linear layers, each followed by ReLU, and a linear head for each task or one for all tasks.

    Args:
        widths: Dimension of the input, and widths of the hidden layers.
        heads: Number of classes of each head.
        bias: Whether the layers and heads have biases.
    """

    def __init__(
        self, widths: Sequence[int] = (64, 100, 100), heads: Sequence[int] = (10,), *, bias: bool = True
    ) -> None:
        super().__init__()
        if not widths or min(widths) < 1:
            raise ValueError(f"widths must be one or more positive numbers, got {tuple(widths)}")
        self.hidden = nn.ModuleList(nn.Linear(inputs, outputs, bias=bias) for inputs, outputs in pairwise(widths))
        self.heads = Heads(widths[-1], heads, bias=bias)

    def features(self, x: Tensor) -> Tensor:
        """Compute the input of the heads, [n, widths[-1]]. x: [n, ...], flattened to [n, widths[0]]."""
        x = x.flatten(start_dim=1)
        for layer in self.hidden:
            x = layer(x).relu()
        return x


def build_mlp(inputs: tuple[int, ...], heads: Sequence[int], *, bias: bool = True) -> MLP:
    """Build a perceptron with two hidden layers of 100 for inputs of any shape."""
    return MLP((math.prod(inputs), 100, 100), heads, bias=bias)
