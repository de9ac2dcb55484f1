"""The reduced ResNet-18 of the paper's Split miniImageNet."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sgp.networks.heads import Heads
from sgp.networks.norm import Statistics, keeps_running
from sgp.networks.shape import refuse_other_shapes

FILTERS = 20
# By the shape of one image: stride of the first convolution, and length of the features.
SHAPES: dict[tuple[int, ...], tuple[int, int]] = {(3, 84, 84): (2, 1440), (3, 32, 32): (1, 640)}


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around which the input is added; by a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, stored: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs, track_running_stats=stored)
        self.conv2 = nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs, track_running_stats=stored)
        # In place, since BatchNorm does not need its output again.
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs, track_running_stats=stored))

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, inputs, h, w] -> [n, outputs, h/stride, w/stride], rounded up."""
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        summed: Tensor = self.relu(out + self.shortcut(x))
        return summed


class ResNet18(nn.Module):
    """A convolution and four stages of two blocks with 20, 40, 80 and 160 filters, and linear heads.

    No layer has a bias.

    Args:
        inputs: shape of one image: (3, 84, 84), where the first convolution has stride 2, or (3, 32, 32).
        heads: number of classes of each task's head; a single one is shared by all tasks.
        statistics: what BatchNorm divides by in eval mode: the current mini-batch with "batch", the published
            choice, so that an image's logits depend on the images beside it; running averages with "stored".
    """

    def __init__(
        self,
        inputs: tuple[int, ...] = (3, 84, 84),
        heads: Sequence[int] = (5,) * 20,
        *,
        statistics: Statistics = "batch",
    ) -> None:
        super().__init__()
        refuse_other_shapes("ResNet-18", inputs, SHAPES)
        first_stride, features = SHAPES[tuple(inputs)]
        stored = keeps_running(statistics)
        self.conv1 = nn.Conv2d(3, FILTERS, kernel_size=3, stride=first_stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(FILTERS, track_running_stats=stored)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _stage(FILTERS, FILTERS, 1, stored=stored)
        self.layer2 = _stage(FILTERS, 2 * FILTERS, 2, stored=stored)
        self.layer3 = _stage(2 * FILTERS, 4 * FILTERS, 2, stored=stored)
        self.layer4 = _stage(4 * FILTERS, 8 * FILTERS, 2, stored=stored)
        self.pool = nn.AvgPool2d(2)
        self.heads = Heads(features, heads)

    def features(self, x: Tensor) -> Tensor:
        """The input of the heads. x: [n, 3, 84, 84] -> [n, 1440], or [n, 3, 32, 32] -> [n, 640]."""
        x = self.relu(self.norm1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return torch.flatten(self.pool(x), start_dim=1)

    def forward(self, x: Tensor, task: int | Tensor = 0) -> Tensor:
        """The logits [n, heads[task]] of one task's head. x: [n, *inputs]."""
        logits: Tensor = self.heads(self.features(x), task)
        return logits


def _stage(inputs: int, outputs: int, stride: int, *, stored: bool) -> nn.Sequential:
    """Two blocks, of which the first changes the shape."""
    return nn.Sequential(
        BasicBlock(inputs, outputs, stride, stored=stored), BasicBlock(outputs, outputs, 1, stored=stored)
    )
