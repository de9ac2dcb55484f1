"""A training step: plain, with the memory attached, and with the published dense projection."""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sgp
from bench import published
from bench.row import Row
from bench.timing import Times, take_turns
from sgp.networks.actor_critic import ActorCritic
from sgp.networks.alexnet import AlexNet
from sgp.projection.subspace import Subspace

RANKS_FILE = Path(__file__).with_name("ranks.json")
# Used until bench.ranks has measured them.
ALEXNET_RANKS = {"conv1": 30, "conv2": 300, "conv3": 350, "fc1": 350, "fc2": 450}
PPO_RANKS = {"trunk.conv1": 100, "trunk.conv2": 200, "trunk.conv3": 250, "trunk.fc": 500}


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

    attached, dense = copy.deepcopy(plain), copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (plain, attached, dense)]
    memory = sgp.GradientMemory(attached, threshold=0.97, alpha=10, exclude=["heads.*"])
    remember(memory, subspaces(attached, ranks, constant=False))
    hook = memory.attach(optimizers[1])
    P = projectors(dense, ranks)
    ways = {
        "plain": make_step(plain, optimizers[0], loss),
        "sgp": make_step(attached, optimizers[1], loss),
        "published": make_step(dense, optimizers[2], loss, lambda: published.project_dense(dense, P)),
    }
    times = take_turns(ways, rounds=rounds, repeat=2, warm=1)
    return _row(f"AlexNet, SGD, batch {batch}", times, 1.05, {"ranks": ranks, "modes": hook.modes})


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

    attached, dense = copy.deepcopy(plain), copy.deepcopy(plain)
    adam, adam_gp = (torch.optim.Adam(m.parameters(), lr=2.5e-4, eps=1e-5) for m in (plain, attached))
    memory = sgp.GradientMemory(attached, threshold=0.995, alpha=25, exclude=["actors.*", "critics.*"])
    remember(memory, subspaces(attached, PPO_RANKS, constant=True))
    hook = memory.attach(adam_gp)
    dense_adam = published.DenseAdam(dense, projectors(dense, PPO_RANKS), lr=2.5e-4)
    ways = {
        "plain": make_step(plain, adam, loss),
        "sgp": make_step(attached, adam_gp, loss),
        "published": make_step(dense, dense_adam, loss),
    }
    times = take_turns(ways, rounds=rounds, repeat=2, warm=1)
    return _row(f"PPO agent, Adam, batch {batch}", times, 1.35, {"ranks": PPO_RANKS, "modes": hook.modes})


def remember(memory: sgp.GradientMemory, found: Mapping[str, Subspace]) -> None:
    """Give a memory subspaces as if an update had found them."""
    entries = [
        {"layers": [name], "basis": s.basis, "importance": s.importance, "rank": s.rank} for name, s in found.items()
    ]
    memory.load_state_dict(memory.state_dict() | {"tasks": 1, "subspaces": entries})


def make_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | published.DenseAdam,
    loss: Callable[[nn.Module], Tensor],
    project: Callable[[], None] | None = None,
) -> Callable[[], None]:
    """Return a function that takes a training step; ``project`` runs between the backward pass and the optimizer."""

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(loss(model))
        if project is not None:
            project()
        optimizer.step()

    return step


def _row(name: str, times: Times, goal: float, detail: dict[str, object]) -> Row:
    return Row(
        name=name,
        unit="s",
        amounts={way: times.median(way) for way in times.seconds},
        against="plain",
        ratio=times.ratio("sgp", to="plain"),
        published_ratio=times.ratio("published", to="plain"),
        goal=goal,
        detail=detail | {"rounds": dict(times.seconds)},
    )
