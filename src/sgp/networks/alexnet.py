"""The five-layer AlexNet of the paper's Split CIFAR-100, with one classifier per task."""

from typing import Literal, overload

import torch
from torch import Tensor, nn

Statistics = Literal["batch", "stored"]


class AlexNet(nn.Module):
    """Three convolutions and two linear layers for images [n, 3, 32, 32], and a linear head for each task.

    No layer has a bias. Each layer is followed by BatchNorm, ReLU and dropout; the convolutions by
    max-pooling as well, after the dropout as in the published network.

    `statistics` says what BatchNorm divides by in eval mode. With "batch", the published choice, it is the
    current mini-batch, so that an image's logits depend on the images beside it. With "stored" it is the
    running averages.
    """

    def __init__(self, tasks: int = 10, classes: int = 10, statistics: Statistics = "batch") -> None:
        super().__init__()
        if statistics not in ("batch", "stored"):
            raise ValueError(f"statistics={statistics!r} is not known: use 'batch' or 'stored'")
        stored = statistics == "stored"
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
        self.relu = nn.ReLU()
        self.light_dropout = nn.Dropout(0.2)
        self.heavy_dropout = nn.Dropout(0.5)
        self.pool = nn.MaxPool2d(2)
        self.heads = nn.ModuleList(nn.Linear(2048, classes, bias=False) for _ in range(tasks))

    def features(self, x: Tensor) -> Tensor:
        """The input of the heads. x: [n, 3, 32, 32] -> [n, 2048]."""
        x = self.pool(self.light_dropout(self.relu(self.norm1(self.conv1(x)))))
        x = self.pool(self.light_dropout(self.relu(self.norm2(self.conv2(x)))))
        x = self.pool(self.heavy_dropout(self.relu(self.norm3(self.conv3(x)))))
        x = torch.flatten(x, start_dim=1)
        x = self.heavy_dropout(self.relu(self.norm4(self.fc1(x))))
        x = self.heavy_dropout(self.relu(self.norm5(self.fc2(x))))
        return x

    @overload
    def forward(self, x: Tensor, task: int) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, task: None = None) -> list[Tensor]: ...

    def forward(self, x: Tensor, task: int | None = None) -> Tensor | list[Tensor]:
        """The logits [n, classes] of one task's head, or of all heads as a list. x: [n, 3, 32, 32]."""
        features = self.features(x)
        if task is None:
            return [head(features) for head in self.heads]
        logits: Tensor = self.heads[task](features)
        return logits
