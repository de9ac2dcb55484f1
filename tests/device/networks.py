"""Small networks with every kind of layer, and batches of an old and a new task."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer

import sgp

# Upper bound of the rounding of float32 in a step and in the products of a check.
LIMIT = 1e-4
OUTPUTS = 4


class ImageNet(nn.Module):
    """A convolution, a norm layer and linear layers of similar sizes, which are projected in a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.first = nn.Linear(72, 40)
        self.second = nn.Linear(40, 40)
        self.third = nn.Linear(40, 40)
        self.head = nn.Linear(40, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu().flatten(1)
        out: Tensor = self.head(self.third(self.second(self.first(x).relu()).relu()).relu())
        return out


class TextNet(nn.Module):
    """An embedding, attention and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.linear = nn.Linear(32, 48)
        self.head = nn.Linear(48, OUTPUTS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        out: Tensor = self.head(self.linear(x.mean(1)).relu())
        return out


def make_images(seed: int) -> Tensor:
    """Return images of the old task (seed 0), which leave two channels empty, or of a new one."""
    images = torch.randn(8, 3, 7, 7, generator=torch.Generator().manual_seed(seed))
    if seed == 0:
        images[:, 1:] = 0
    return images


def make_texts(seed: int) -> Tensor:
    """Return texts of the old task (seed 0), which lack half of the tokens, or of a new one."""
    return torch.randint(0, 6 if seed == 0 else 11, (8, 5), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """A network with its data.

    Attributes:
        build: Function that makes the network.
        make_batch: Function that returns the batch of a seed, on the CPU; seed 0 is the old task's.
    """

    build: Callable[[], nn.Module]
    make_batch: Callable[[int], Tensor]

    @property
    def old_batch(self) -> Tensor:
        """The batch of the old task, on the CPU."""
        return self.make_batch(0)


CASES = {"images": Case(ImageNet, make_images), "texts": Case(TextNet, make_texts)}
IMAGES, TEXTS = CASES["images"], CASES["texts"]


def make_sgd(model: nn.Module) -> SGD:
    """Return SGD with momentum, for which every mode is exact."""
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_adam(model: nn.Module) -> Adam:
    """Return Adam, for which only the step mode is exact."""
    return Adam(model.parameters(), lr=0.01)


def make_memory(model: nn.Module, **settings: Any) -> sgp.GradientMemory:
    """Return a memory that blocks the span of the old inputs."""
    options: dict[str, Any] = {"threshold": 1.0, "alpha": math.inf, "exclude": ["head*"]} | settings
    return sgp.GradientMemory(model, **options)


def train(case: Case, model: nn.Module, optimizer: Optimizer, device: torch.device, steps: int = 12) -> None:
    """Train on new batches."""
    for step in range(1, steps + 1):
        compute_gradient(case, model, optimizer, device, step)
        optimizer.step()


def compute_gradient(case: Case, model: nn.Module, optimizer: Optimizer, device: torch.device, seed: int = 1) -> None:
    """Run forward and backward on a new batch."""
    labels = torch.randint(0, OUTPUTS, (8,), generator=torch.Generator().manual_seed(seed), device="cpu")
    optimizer.zero_grad()
    outputs = model(prepare_batch(case.make_batch(seed), model).to(device))
    F.cross_entropy(outputs.float(), labels.to(device)).backward()


def prepare_batch(batch: Tensor, model: nn.Module) -> Tensor:
    """Return a batch in the precision of a model."""
    return batch.to(next(model.parameters()).dtype) if batch.is_floating_point() else batch


def copy_weights(model: nn.Module, device: torch.device | str | None = None) -> dict[str, Tensor]:
    """Return copies of a model's weights, optionally on another device."""
    return {name: value.detach().clone().to(device or value.device) for name, value in model.state_dict().items()}


def copy_to(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a model on a device."""
    return copy.deepcopy(model).to(device)


def assert_protected(memory: sgp.GradientMemory, case: Case, before: dict[str, Tensor], limit: float = LIMIT) -> None:
    """Assert that every layer with free capacity has trained, and that outputs for the old batch have not changed."""
    result = memory.check(prepare_batch(case.old_batch, memory.model), reference=before)
    moved = {n: not torch.equal(t.cpu(), before[n].cpu()) for n, t in memory.model.state_dict().items()}
    assert all(moved[layer.weight.name] for layer in memory.layers.values()), moved
    assert {layer.layer for layer in result.layers} == set(memory.layers)
    assert result.leak < limit, result
    assert max(layer.drift for layer in result.layers) < limit, result
