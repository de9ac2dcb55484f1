"""CPU time of a step of ResNet-18 on batches of 10 images of 84 x 84 pixels, as in Split miniImageNet."""

from __future__ import annotations

import copy
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sgp
from bench.row import Row
from bench.steps import make_step, remember, subspaces
from bench.timing import take_turns
from sgp.networks.resnet18 import ResNet18

BATCH = 10
# Bases per dimension of a layer's input after three tasks, by the bytes in memory.csv of the committed run.
RANK_SHARE = 0.6
GOAL = 1.4


def row(*, rounds: int) -> Row:
    """Return the cost of a step with the memory, beside the plain step."""
    torch.manual_seed(0)
    plain = ResNet18().train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    attached = copy.deepcopy(plain)
    images = torch.randn(BATCH, 3, 84, 84).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 5, (BATCH,))

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(images, 0), labels)

    ranks = {
        name: max(1, int(RANK_SHARE * module.weight[0].numel()))
        for name, module in plain.named_modules()
        if isinstance(module, nn.Conv2d)
    }
    memory = sgp.GradientMemory(attached, threshold=0.985, alpha=1, exclude=["heads.*"])
    remember(memory, subspaces(attached, ranks, constant=False))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (plain, attached)]
    hook = memory.attach(optimizers[1])
    ways = {"plain": make_step(plain, optimizers[0], loss), "sgp": make_step(attached, optimizers[1], loss)}
    times = take_turns(ways, rounds=rounds, repeat=2, warm=1, clock=time.process_time)
    return Row(
        name=f"ResNet-18, SGD, batch {BATCH}",
        unit="s",
        amounts={way: times.median(way) for way in ways},
        against="plain",
        ratio=times.ratio("sgp", to="plain"),
        goal=GOAL,
        note=", ".join(f"{way} {1e3 * min(times.seconds[way]) / BATCH:.1f} ms" for way in ways)
        + " of CPU time per image in the fastest round",
        detail={"ranks": ranks, "modes": hook.modes, "rounds": dict(times.seconds)},
    )
