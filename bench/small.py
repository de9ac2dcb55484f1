"""Steps of small networks, in which bookkeeping would cost more than products: 12 linear layers, batches of 32."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from types import FrameType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.row import Row
from bench.steps import compare, random_subspace

LAYERS, BATCH = 12, 32
WIDTHS = {
    "12 layers of 64": [64] * (LAYERS + 1),
    # The learning rate changes at every step here.
    "12 layers of 48 to 92, scheduled rate": [*range(48, 48 + 4 * LAYERS, 4), 92],
}
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
}
GOALS = {
    ("Adam", "12 layers of 64"): 1.15,
    ("SGD", "12 layers of 64"): 1.25,
    ("Adam", "12 layers of 48 to 92, scheduled rate"): 1.25,
    ("SGD", "12 layers of 48 to 92, scheduled rate"): 1.35,
}


def rows(*, rounds: int) -> list[Row]:
    """Return the cost of a step of each network with each optimizer, beside the plain step."""
    return [_measure(optimizer, network, rounds) for network in WIDTHS for optimizer in OPTIMIZERS]


def _measure(optimizer: str, network: str, rounds: int) -> Row:
    widths = WIDTHS[network]
    torch.manual_seed(0)
    plain = _make_network(widths)
    inputs, targets = torch.randn(BATCH, widths[0]), torch.randn(BATCH, widths[-1])
    # Bases for a quarter of the dimensions of each layer.
    bases = {str(2 * i): random_subspace(w + 1, w // 4, i) for i, w in enumerate(widths[:-1])}
    return compare(
        f"{network}, {optimizer}",
        plain,
        lambda model: F.mse_loss(model(inputs), targets),
        OPTIMIZERS[optimizer],
        bases,
        {"threshold": 0.97, "alpha": 10},
        GOALS[optimizer, network],
        is_scheduled="scheduled" in network,
        untimed=20,
        describe=lambda step: {"calls per layer": count_calls(step) / LAYERS},
        rounds=rounds,
        repeat=5,
        warm=2,
    )


def count_calls(step: Callable[[], None]) -> int:
    """Return the number of calls of Python functions of the package in a step."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_globals.get("__name__", "").startswith("sgp.")

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def _make_network(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
