"""The five-layer AlexNet of the paper's Split CIFAR-100."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from sgp.networks.dropout import FastDropout, ReLUDropoutPool
from sgp.networks.heads import HeadedNetwork, Heads, check_shape
from sgp.networks.norm import Statistics, tracks_running_stats


class AlexNet(HeadedNetwork):
    """Three convolutions and two linear layers for images [n, 3, 32, 32], and linear heads.

    No layer has a bias. Each layer is followed by BatchNorm, ReLU and dropout; the convolutions also by
    max-pooling, after the dropout as in the published network.

    Args:
        inputs: Shape of one image.
        heads: Number of classes of each task's head; a single head is shared by all tasks.
        statistics: Statistics by which BatchNorm normalizes in eval mode: "batch" for those of the mini-batch, as
            published, so that an image's logits depend on the rest of the batch; "stored" for running averages.
    """

    def __init__(
        self,
        inputs: tuple[int, ...] = (3, 32, 32),
        heads: Sequence[int] = (10,) * 10,
        *,
        statistics: Statistics = "batch",
    ) -> None:
        super().__init__()
        check_shape("AlexNet", inputs, [(3, 32, 32)])
        stored = tracks_running_stats(statistics)
        norm2d = partial(nn.BatchNorm2d, track_running_stats=stored)
        norm1d = partial(nn.BatchNorm1d, track_running_stats=stored)
        self.conv1 = nn.Conv2d(3, 64, kernel_size=4, bias=False)
        self.norm1 = norm2d(64)
        self.conv2 = nn.Conv2d(64, 128, kernel_size=3, bias=False)
        self.norm2 = norm2d(128)
        self.conv3 = nn.Conv2d(128, 256, kernel_size=2, bias=False)
        self.norm3 = norm2d(256)
        self.fc1 = nn.Linear(1024, 2048, bias=False)
        self.norm4 = norm1d(2048)
        self.fc2 = nn.Linear(2048, 2048, bias=False)
        self.norm5 = norm1d(2048)
        self.light_pool = ReLUDropoutPool(0.2, size=2)
        self.heavy_pool = ReLUDropoutPool(0.5, size=2)
        # In place, since BatchNorm does not need its output again.
        self.relu = nn.ReLU(inplace=True)
        self.dropout = FastDropout(0.5)
        self.heads = Heads(2048, heads)

    def features(self, x: Tensor) -> Tensor:
        """Compute the input of the heads. x: [n, 3, 32, 32] -> [n, 2048]."""
        x = self.light_pool(self.norm1(self.conv1(x)))
        x = self.light_pool(self.norm2(self.conv2(x)))
        x = self.heavy_pool(self.norm3(self.conv3(x)))
        x = torch.flatten(x, start_dim=1)
        x = self.dropout(self.relu(self.norm4(self.fc1(x))))
        return self.dropout(self.relu(self.norm5(self.fc2(x))))  # type: ignore[no-any-return]
