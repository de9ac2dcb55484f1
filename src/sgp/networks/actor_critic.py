"""The paper's agent for Atari: one convolutional trunk, an actor and a critic for each game."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ActorCritic(nn.Module):
    """Policy logits and state values for stacks of four frames [n, 4, 84, 84] with pixels 0..255.

    `actions` gives the number of actions of each game; its default is the paper's six games in their order.
    Trunk and heads have biases.
    """

    def __init__(self, actions: Sequence[int] = (14, 18, 18, 18, 18, 6)) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 32, kernel_size=8, stride=4)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=4, stride=2)
        self.conv3 = nn.Conv2d(64, 128, kernel_size=3)
        self.fc = nn.Linear(128 * 7 * 7, 1024)
        self.actors = nn.ModuleList(nn.Linear(1024, count) for count in actions)
        self.critics = nn.ModuleList(nn.Linear(1024, 1) for _ in actions)

        for layer in (self.conv1, self.conv2, self.conv3, self.fc):
            _initialise(layer, gain=math.sqrt(2))
        for critic in self.critics:
            _initialise(critic, gain=1.0)
        # A policy that starts near uniform: no action is preferred before a reward was seen.
        for actor in self.actors:
            _initialise(actor, gain=0.01)

    def features(self, observations: Tensor) -> Tensor:
        """The input of the heads. observations: [n, 4, 84, 84], 0..255 of any dtype -> [n, 1024]."""
        x = observations.to(self.conv1.weight.dtype) / 255
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.conv2(x))
        x = torch.relu(self.conv3(x))
        return torch.relu(self.fc(torch.flatten(x, start_dim=1)))

    def forward(self, observations: Tensor, game: int) -> tuple[Tensor, Tensor]:
        """The action logits [n, actions[game]] and values [n] of one game. observations: [n, 4, 84, 84]."""
        features = self.features(observations)
        return self.actors[game](features), self.critics[game](features).squeeze(-1)


def _initialise(layer: nn.Module, gain: float) -> None:
    """Orthogonal weight with the given gain, bias 0."""
    assert isinstance(layer, nn.Conv2d | nn.Linear)
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
