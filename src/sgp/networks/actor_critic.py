"""Agents for games: one convolutional trunk for all games, and an actor and a critic for each game."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sgp.networks.heads import check_shape


@dataclass(frozen=True)
class TrunkShape:
    """Sizes of a trunk.

    Attributes:
        inputs: Channels, height and width of an observation.
        filters: Number, width and stride of each convolution's filters.
        features: Number of features.
        scale: Divisor of the observations.
    """

    inputs: tuple[int, int, int]
    filters: tuple[tuple[int, int, int], ...]
    features: int
    scale: float


# The paper's trunk, on stacks of four frames with pixels 0..255.
ATARI = TrunkShape((4, 84, 84), ((32, 8, 4), (64, 4, 2), (128, 3, 1)), 1024, 255)
# The trunk of the first deep Q-network, ten times smaller.
SMALL_ATARI = TrunkShape((4, 84, 84), ((16, 8, 4), (32, 4, 2)), 256, 255)
# The trunk of the MinAtar paper, on channels of zeros and ones.
MINATAR = TrunkShape((10, 10, 10), ((16, 3, 1),), 128, 1)
SHAPES = {"actor-critic": ATARI, "small-actor-critic": SMALL_ATARI, "minatar-actor-critic": MINATAR}


class Trunk(nn.Module):
    """Layers that all games share: convolutions and a linear layer, each followed by ReLU."""

    def __init__(self, shape: TrunkShape) -> None:
        super().__init__()
        self.shape = shape
        channels, *sides = shape.inputs
        self.convolutions: list[str] = []
        for number, (filters, width, stride) in enumerate(shape.filters, start=1):
            self.convolutions.append(f"conv{number}")
            self.add_module(self.convolutions[-1], nn.Conv2d(channels, filters, kernel_size=width, stride=stride))
            channels, sides = filters, [(side - width) // stride + 1 for side in sides]
        self.fc = nn.Linear(channels * math.prod(sides), shape.features)
        for layer in self.children():
            _initialize(layer, gain=math.sqrt(2))

    def forward(self, observations: Tensor) -> Tensor:
        """Compute the input of the heads, [n, features]. observations: [n, *inputs] of any dtype."""
        x = observations.to(self.fc.weight.dtype)
        if self.shape.scale != 1:
            x = x / self.shape.scale
        for name in self.convolutions:
            x = torch.relu(self.get_submodule(name)(x))
        return torch.relu(self.fc(torch.flatten(x, start_dim=1)))


class ActorCritic(nn.Module):
    """Policy and state values of an agent that plays several games. Trunk and heads have biases.

    Args:
        actions: Number of actions of each game; by default, those of the paper's six games in their order.
        shape: Sizes of the trunk; by default the paper's.
    """

    def __init__(self, actions: Sequence[int] = (14, 18, 18, 18, 18, 6), shape: TrunkShape = ATARI) -> None:
        super().__init__()
        self.trunk = Trunk(shape)
        self.actors = nn.ModuleList(nn.Linear(shape.features, count) for count in actions)
        self.critics = nn.ModuleList(nn.Linear(shape.features, 1) for _ in actions)
        for critic in self.critics:
            _initialize(critic, gain=1.0)
        # The initial policy is nearly uniform, so that no action is preferred before the first reward.
        for actor in self.actors:
            _initialize(actor, gain=0.01)

    def forward(self, observations: Tensor, game: int) -> Tensor:
        """Compute the action logits of one game, [n, actions[game]]. observations: [n, *inputs] of any dtype."""
        logits: Tensor = self.actors[game](self.trunk(observations))
        return logits

    def logits_and_values(self, observations: Tensor, game: int) -> tuple[Tensor, Tensor]:
        """Compute the action logits [n, actions[game]] and the state values [n] of one game."""
        features = self.trunk(observations)
        return self.actors[game](features), self.critics[game](features).squeeze(-1)


def _initialize(layer: nn.Module, gain: float) -> None:
    """Draw an orthogonal weight with the given gain, and set the bias to 0."""
    assert isinstance(layer, nn.Conv2d | nn.Linear)
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)


def build_agent(name: str, inputs: tuple[int, ...], heads: Sequence[int]) -> ActorCritic:
    """Build an agent by its registered name."""
    shape = SHAPES[name]
    check_shape(name, inputs, [shape.inputs])
    return ActorCritic(heads, shape)
