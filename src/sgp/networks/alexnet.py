"""The five-layer AlexNet of the paper's Split CIFAR-100."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sgp.networks.dropout import FastDropout, ReLUDropoutPool
from sgp.networks.heads import Heads
from sgp.networks.norm import Statistics, keeps_running
from sgp.networks.shape import refuse_other_shapes


class AlexNet(nn.Module):
    """Three convolutions and two linear layers for images [n, 3, 32, 32], and linear heads.

    No layer has a bias. Each layer is followed by BatchNorm, ReLU and dropout; the convolutions by
    max-pooling as well, after the dropout as in the published network.

    Args:
        inputs: shape of one image.
        heads: number of classes of each task's head; a single one is shared by all tasks.
        statistics: what BatchNorm divides by in eval mode: the current mini-batch with "batch", the published
            choice, so that an image's logits depend on the images beside it; running averages with "stored".
    """

    def __init__(
        self,
        inputs: tuple[int, ...] = (3, 32, 32),
        heads: Sequence[int] = (10,) * 10,
        *,
        statistics: Statistics = "batch",
    ) -> None:
        super().__init__()
        refuse_other_shapes("AlexNet", inputs, [(3, 32, 32)])
        stored = keeps_running(statistics)
        self.conv1 = nn.Conv2d(3, 64, kernel_size=4, bias=False)
        self.norm1 = nn.BatchNorm2d(64, track_running_stats=stored)
        self.conv2 = nn.Conv2d(64, 128, kernel_size=3, bias=False)
        self.norm2 = nn.BatchNorm2d(128, track_running_stats=stored)
        self.conv3 = nn.Conv2d(128, 256, kernel_size=2, bias=False)
        self.norm3 = nn.BatchNorm2d(256, track_running_stats=stored)
        self.fc1 = nn.Linear(1024, 2048, bias=False)
        self.norm4 = nn.BatchNorm1d(2048, track_running_stats=stored)
        self.fc2 = nn.Linear(2048, 2048, bias=False)
        self.norm5 = nn.BatchNorm1d(2048, track_running_stats=stored)
        self.light_pool = ReLUDropoutPool(0.2, size=2)
        self.heavy_pool = ReLUDropoutPool(0.5, size=2)
        # In place, since BatchNorm does not need its output again.
        self.relu = nn.ReLU(inplace=True)
        self.dropout = FastDropout(0.5)
        self.heads = Heads(2048, heads)

    def features(self, x: Tensor) -> Tensor:
        """The input of the heads. x: [n, 3, 32, 32] -> [n, 2048]."""
        x = self.light_pool(self.norm1(self.conv1(x)))
        x = self.light_pool(self.norm2(self.conv2(x)))
        x = self.heavy_pool(self.norm3(self.conv3(x)))
        x = torch.flatten(x, start_dim=1)
        x = self.dropout(self.relu(self.norm4(self.fc1(x))))
        x = self.dropout(self.relu(self.norm5(self.fc2(x))))
        return x

    def forward(self, x: Tensor, task: int | Tensor = 0) -> Tensor:
        """The logits [n, heads[task]] of one task's head. x: [n, 3, 32, 32]."""
        logits: Tensor = self.heads(self.features(x), task)
        return logits
