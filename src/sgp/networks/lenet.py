"""The LeNet of the paper's CIFAR-100 Superclass."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sgp.networks.heads import HeadedNetwork, Heads, check_shape
from sgp.networks.response_norm import FastResponseNorm


class LeNet(HeadedNetwork):
    """Two convolutions and two linear layers for images [n, 3, 32, 32], and linear heads.

    No layer has a bias. Each layer is followed by ReLU; the convolutions also by local response normalization and
    max-pooling. The initial weights are uniform, with the deviation that preserves the variance through ReLU.

    Args:
        inputs: Shape of one image.
        heads: Number of classes of each task's head; a single head is shared by all tasks.
    """

    def __init__(self, inputs: tuple[int, ...] = (3, 32, 32), heads: Sequence[int] = (5,) * 20) -> None:
        super().__init__()
        check_shape("LeNet", inputs, [(3, 32, 32)])
        self.conv1 = nn.Conv2d(3, 20, kernel_size=5, padding=2, bias=False)
        self.conv2 = nn.Conv2d(20, 50, kernel_size=5, padding=2, bias=False)
        self.fc1 = nn.Linear(3200, 800, bias=False)
        self.fc2 = nn.Linear(800, 500, bias=False)
        # In place, since no layer needs its output again.
        self.relu = nn.ReLU(inplace=True)
        self.norm = FastResponseNorm(4, alpha=0.001 / 9)
        self.pool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.heads = Heads(500, heads)
        for weight in self.parameters():
            nn.init.kaiming_uniform_(weight, nonlinearity="relu")

    def features(self, x: Tensor) -> Tensor:
        """Compute the input of the heads. x: [n, 3, 32, 32] -> [n, 500]."""
        x = self.pool(self.norm(self.relu(self.conv1(x))))
        x = self.pool(self.norm(self.relu(self.conv2(x))))
        x = self.relu(self.fc1(torch.flatten(x, start_dim=1)))
        return self.relu(self.fc2(x))  # type: ignore[no-any-return]
