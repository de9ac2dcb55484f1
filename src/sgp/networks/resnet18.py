"""The reduced ResNet-18 of the paper's Split miniImageNet."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sgp.networks.heads import HeadedNetwork, Heads, check_shape
from sgp.networks.norm import Statistics, tracks_running_stats

FILTERS = 20
# Stride of the first convolution and number of features, by the shape of one image.
SHAPES: dict[tuple[int, ...], tuple[int, int]] = {(3, 84, 84): (2, 1440), (3, 32, 32): (1, 640)}


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

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
        """Compute the block's output. x: [n, inputs, h, w] -> [n, outputs, h/stride, w/stride], rounded up."""
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        summed: Tensor = self.relu(out + self.shortcut(x))
        return summed


class ResNet18(HeadedNetwork):
    """A convolution and four stages of two blocks with 20, 40, 80 and 160 filters, and linear heads.

    No layer has a bias.

    Args:
        inputs: Shape of one image: (3, 84, 84), where the first convolution has stride 2, or (3, 32, 32).
        heads: Number of classes of each task's head; a single head is shared by all tasks.
        statistics: Statistics by which BatchNorm normalizes in eval mode: "batch" for those of the mini-batch, as
            published, so that an image's logits depend on the rest of the batch; "stored" for running averages.
    """

    def __init__(
        self,
        inputs: tuple[int, ...] = (3, 84, 84),
        heads: Sequence[int] = (5,) * 20,
        *,
        statistics: Statistics = "batch",
    ) -> None:
        super().__init__()
        check_shape("ResNet-18", inputs, SHAPES)
        first_stride, features = SHAPES[tuple(inputs)]
        stored = tracks_running_stats(statistics)
        self.conv1 = nn.Conv2d(3, FILTERS, kernel_size=3, stride=first_stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(FILTERS, track_running_stats=stored)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _make_stage(FILTERS, FILTERS, stored=stored)
        self.layer2 = _make_stage(FILTERS, 2 * FILTERS, stored=stored)
        self.layer3 = _make_stage(2 * FILTERS, 4 * FILTERS, stored=stored)
        self.layer4 = _make_stage(4 * FILTERS, 8 * FILTERS, stored=stored)
        self.pool = nn.AvgPool2d(2)
        self.heads = Heads(features, heads)

    def features(self, x: Tensor) -> Tensor:
        """Compute the input of the heads. x: [n, 3, 84, 84] -> [n, 1440], or [n, 3, 32, 32] -> [n, 640]."""
        x = self.relu(self.norm1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return torch.flatten(self.pool(x), start_dim=1)


def _make_stage(inputs: int, outputs: int, *, stored: bool) -> nn.Sequential:
    """Create two blocks, of which the first halves the maps if it changes the number of filters."""
    first = BasicBlock(inputs, outputs, 1 if inputs == outputs else 2, stored=stored)
    return nn.Sequential(first, BasicBlock(outputs, outputs, 1, stored=stored))
