"""Tasks for methods that grow the network, trained as the trainer does."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgp.methods import Batch, Moment
from sgp.methods.growing import Growing
from sgp.networks import MLP, AlexNet, LeNet, ResNet18

IMAGE = (3, 32, 32)
HEADS = (3, 2, 4)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP((12, 16, 8), HEADS),
    "shared": lambda: MLP((12, 16, 8), (4,)),
    "lenet": lambda: LeNet(heads=HEADS),
    "alexnet": lambda: AlexNet(heads=HEADS),
    "alexnet-stored": lambda: AlexNet(heads=HEADS, statistics="stored"),
    "resnet18-stored": lambda: ResNet18(IMAGE, HEADS, statistics="stored"),
}


def get_shape(kind: str) -> tuple[int, ...]:
    return (12,) if kind in ("mlp", "shared") else IMAGE


def get_excluded(kind: str) -> list[str]:
    return [] if kind == "shared" else ["heads.*"]


def make_network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[kind]().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def make_batch(task: int, shape: tuple[int, ...] = (12,), count: int = 12) -> Batch:
    generator = torch.Generator().manual_seed(task)
    return torch.randn(count, *shape, generator=generator), torch.arange(count) % HEADS[task]


def learn(method: Growing[Any], head: int, shape: tuple[int, ...] = (12,), *, steps: int = 3) -> None:
    """Train on a task up to its end, without consolidation."""
    batch = make_batch(head, shape)
    torch.manual_seed(head)
    method.begin_task(head, [batch])
    optimizer = method.build_optimizer(torch.optim.SGD, 0.1 if len(shape) == 1 else 0.01)
    method.attach(optimizer)
    method.network.train()
    for step in range(steps):
        method.step(batch, head, Moment(0, step / steps, step / steps), optimizer)


def consolidate(method: Growing[Any], head: int, shape: tuple[int, ...] = (12,)) -> None:
    def log_likelihood(batch: Batch) -> Tensor:
        return -F.cross_entropy(method.compute_logits(batch[0], head), batch[1], reduction="none")

    method.consolidate([make_batch(head, shape)], log_likelihood)


@torch.no_grad()
def get_logits(method: Growing[Any], head: int, shape: tuple[int, ...] = (12,)) -> Tensor:
    method.network.eval()
    return method.compute_logits(make_batch(head, shape)[0], head)
