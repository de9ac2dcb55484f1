"""A training step: plain, with the memory attached, and with the published dense projection."""

import copy
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import sgp
from bench import published
from bench.row import Row
from bench.timing import take_turns
from sgp.networks.actor_critic import ActorCritic
from sgp.networks.alexnet import AlexNet
from sgp.networks.resnet18 import ResNet18
from sgp.projection.subspace import Subspace

RANKS_FILE = Path(__file__).with_name("ranks.json")
# Used until bench.ranks has measured them.
ALEXNET_RANKS = {"conv1": 30, "conv2": 300, "conv3": 350, "fc1": 350, "fc2": 450}
PPO_RANKS = {"trunk.conv1": 100, "trunk.conv2": 200, "trunk.conv3": 250, "trunk.fc": 500}
# Bases per dimension of a layer's input after three tasks, by the bytes in memory.csv of the committed run.
RESNET18_RANK_SHARE = 0.6


def alexnet_ranks() -> dict[str, int]:
    """Return the ranks of the memory after the last task that bench.ranks trained."""
    if not RANKS_FILE.exists():
        return ALEXNET_RANKS
    ranks: dict[str, int] = json.loads(RANKS_FILE.read_text())["tasks"][-1]["ranks"]
    return ranks


def random_subspace(dimension: int, rank: int, seed: int) -> Subspace:
    """Create a subspace of one group with random orthonormal bases and importances from 1 down to 0.2."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(dimension, rank, generator=generator)).Q
    return Subspace(basis.unsqueeze(0).contiguous(), torch.linspace(1, 0.2, rank).unsqueeze(0), torch.tensor([rank]))


def subspaces(model: nn.Module, ranks: Mapping[str, int], *, constant: bool) -> dict[str, Subspace]:
    """Random subspaces of the given ranks; `constant` adds the input of a protected bias to each."""
    out = {}
    for seed, (name, rank) in enumerate(ranks.items()):
        weight = model.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        out[name] = random_subspace(weight[0].numel() + int(constant), rank, seed)
    return out


def projectors(model: nn.Module, ranks: Mapping[str, int]) -> dict[str, Tensor]:
    """Dense projectors of the same ranks for the published forms, which know no bias."""
    found = subspaces(model, ranks, constant=False)
    return {name: published.projector(s.basis[0], s.importance[0]) for name, s in found.items()}


def alexnet_row(*, rounds: int, batch: int = 64) -> Row:
    """AlexNet in train mode, SGD."""
    ranks = alexnet_ranks()
    torch.manual_seed(0)
    plain = AlexNet().train()
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(images, task=0), labels)

    def make_published(dense: nn.Module) -> Callable[[], None]:
        P = projectors(dense, ranks)
        return make_step(dense, make_sgd(dense.parameters()), loss, lambda: published.project_dense(dense, P))

    memory = {"threshold": 0.97, "alpha": 10, "exclude": ["heads.*"]}
    bases = subspaces(plain, ranks, constant=False)
    name = f"AlexNet, SGD, batch {batch}"
    row = compare(name, plain, loss, make_sgd, bases, memory, 1.05, make_published, rounds=rounds)
    return replace(row, detail={"ranks": ranks} | row.detail)


def resnet18_row(*, rounds: int, batch: int = 10) -> Row:
    """ResNet-18 on images of 84 x 84 pixels, as in Split miniImageNet, SGD, in CPU time."""
    torch.manual_seed(0)
    plain = ResNet18().train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(batch, 3, 84, 84).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 5, (batch,))

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(images, 0), labels)

    ranks = {
        name: max(1, int(RESNET18_RANK_SHARE * module.weight[0].numel()))
        for name, module in plain.named_modules()
        if isinstance(module, nn.Conv2d)
    }
    memory = {"threshold": 0.985, "alpha": 1, "exclude": ["heads.*"]}
    bases = subspaces(plain, ranks, constant=False)
    name, clock = f"ResNet-18, SGD, batch {batch}", time.process_time
    row = compare(name, plain, loss, make_sgd, bases, memory, 1.4, rounds=rounds, clock=clock)
    fastest = {way: min(seconds) for way, seconds in row.detail["rounds"].items()}  # type: ignore[attr-defined]
    note = ", ".join(f"{way} {1e3 * seconds / batch:.1f} ms" for way, seconds in fastest.items())
    note += " of CPU time per image in the fastest round"
    return replace(row, note=note, detail={"ranks": ranks} | row.detail)


def ppo_row(*, rounds: int, batch: int = 250) -> Row:
    """Return the paper's agent with a loss like PPO's and Adam."""
    torch.manual_seed(0)
    plain = ActorCritic()
    frames = torch.randint(0, 256, (batch, 4, 84, 84)).float()
    actions = torch.randint(0, 18, (batch,))
    advantages, returns, old = torch.randn(batch), torch.randn(batch), -torch.rand(batch) - 2

    def loss(model: nn.Module) -> Tensor:
        assert isinstance(model, ActorCritic)
        logits, values = model.logits_and_values(frames, game=1)
        log_policy = F.log_softmax(logits, dim=-1)
        change = (log_policy.gather(1, actions.unsqueeze(1)).squeeze(1) - old).exp()
        gain = torch.minimum(change * advantages, change.clamp(0.9, 1.1) * advantages).mean()
        entropy = -(log_policy.exp() * log_policy).sum(-1).mean()
        return F.mse_loss(values, returns) / 4 - gain - 0.01 * entropy

    def make_adam(parameters: Iterable[Tensor]) -> Optimizer:
        return torch.optim.Adam(parameters, lr=2.5e-4, eps=1e-5)

    def make_published(dense: nn.Module) -> Callable[[], None]:
        return make_step(dense, published.DenseAdam(dense, projectors(dense, PPO_RANKS), lr=2.5e-4), loss)

    memory = {"threshold": 0.995, "alpha": 25, "exclude": ["actors.*", "critics.*"]}
    bases = subspaces(plain, PPO_RANKS, constant=True)
    name = f"PPO agent, Adam, batch {batch}"
    row = compare(name, plain, loss, make_adam, bases, memory, 1.35, make_published, rounds=rounds)
    return replace(row, detail={"ranks": PPO_RANKS} | row.detail)


def make_sgd(parameters: Iterable[Tensor]) -> Optimizer:
    """Create the optimizer of the measurements with SGD."""
    return torch.optim.SGD(parameters, lr=0.01)


def compare(
    name: str,
    plain: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    make_optimizer: Callable[[Iterable[Tensor]], Optimizer],
    bases: Mapping[str, Subspace],
    settings: Mapping[str, Any],
    goal: float,
    make_published: Callable[[nn.Module], Callable[[], None]] | None = None,
    *,
    is_scheduled: bool = False,
    untimed: int = 0,
    describe: Callable[[Callable[[], None]], dict[str, object]] = lambda step: {},
    rounds: int,
    repeat: int = 2,
    warm: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Row:
    """Measure steps in turns: plain, with the memory attached, and as published.

    Args:
        name: Name of the row.
        plain: Model.
        loss: Loss of a model.
        make_optimizer: Function that creates the optimizer of parameters.
        bases: Subspaces of the memory by layer.
        settings: Settings of the memory.
        goal: What the ratio should not exceed.
        make_published: Function that returns the published step of a model.
        is_scheduled: Whether the learning rate changes at each step.
        untimed: Number of steps before the first round.
        describe: Function that returns details of the step with the memory.
        rounds: Number of rounds.
        repeat: Number of timed steps of a turn.
        warm: Number of untimed steps of a turn.
        clock: Clock.
    """
    attached = copy.deepcopy(plain)
    optimizers = [make_optimizer(model.parameters()) for model in (plain, attached)]
    memory = sgp.GradientMemory(attached, **settings)
    remember(memory, bases)
    hook = memory.attach(optimizers[1])
    ways = {
        way: make_step(model, optimizer, loss, is_scheduled=is_scheduled)
        for way, model, optimizer in zip(("plain", "sgp"), (plain, attached), optimizers, strict=True)
    }
    if make_published is not None:
        ways["published"] = make_published(copy.deepcopy(plain))
    for _ in range(untimed):
        for step in ways.values():
            step()
    times = take_turns(ways, rounds=rounds, repeat=repeat, warm=warm, clock=clock)
    return Row(
        name=name,
        unit="s",
        amounts={way: times.median(way) for way in ways},
        against="plain",
        ratio=times.ratio("sgp", to="plain"),
        published_ratio=times.ratio("published", to="plain") if "published" in ways else None,
        goal=goal,
        detail=describe(ways["sgp"]) | {"modes": hook.modes, "rounds": dict(times.seconds)},
    )


def remember(memory: sgp.GradientMemory, found: Mapping[str, Subspace]) -> None:
    """Give a memory subspaces as if an update had found them."""
    entries = [
        {"layers": [name], "basis": s.basis, "importance": s.importance, "rank": s.rank} for name, s in found.items()
    ]
    memory.load_state_dict(memory.state_dict() | {"tasks": 1, "subspaces": entries})


def make_step(
    model: nn.Module,
    optimizer: Optimizer | published.DenseAdam,
    loss: Callable[[nn.Module], Tensor],
    project: Callable[[], None] | None = None,
    *,
    is_scheduled: bool = False,
) -> Callable[[], None]:
    """Return a function that takes a training step; ``project`` runs between the backward pass and the optimizer."""
    scheduler = CosineAnnealingLR(optimizer, 1_000_000) if is_scheduled and isinstance(optimizer, Optimizer) else None

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(loss(model))
        if project is not None:
            project()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()

    return step
