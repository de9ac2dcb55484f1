"""Models, loaders and assertions for tests that collect the inputs of layers."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from sgp.projection.collect import collect_inputs
from sgp.projection.gram import InputGram
from sgp.projection.scan import ScanRules, scan_model


def collect_grams(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    samples: int | dict[str, int] | None = None,
    bias: Any = "freeze",
    forward: Callable[[Any], Any] | None = None,
    mask: Callable[[Any], Tensor | None] | None = None,
) -> dict[str, InputGram]:
    """Return what one pass collects, with products in float64."""
    layers = list(scan_model(model, ScanRules(bias=bias)).layers.values())
    limits = {g.name: samples.get(g.name) if isinstance(samples, dict) else samples for g in layers}
    return collect_inputs(model, batches, layers, forward=forward, samples=limits, mask=mask)


def gram(inputs: InputGram) -> Tensor:
    """Return R R^T [groups, d, d], from kept rows or from their Gram matrix."""
    rows = inputs.get_rows()
    return inputs.get_gram() if rows is None else rows.mT @ rows


def gram_of(*inputs: Tensor) -> Tensor:
    rows = torch.cat([x.reshape(-1, x.shape[-1]) for x in inputs]).double()
    return (rows.mT @ rows).unsqueeze(0)


def assert_is_gram_of(found: InputGram, *inputs: Tensor) -> None:
    torch.testing.assert_close(gram(found), gram_of(*inputs), rtol=1e-6, atol=1e-6)


class Net(nn.Module):
    """Convolution, BatchNorm, dropout and a linear layer: something of everything that leaves traces."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(4 * 16, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.fc(self.drop(self.norm(self.conv(x)).relu()).flatten(1))


def images(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 2, 4, 4, generator=torch.Generator().manual_seed(seed))


class Noisy(TensorDataset):
    """Draws from every random state that there is; fails at one index if told so."""

    def __init__(self, data: Tensor, fail_at: int | None = None) -> None:
        super().__init__(data)
        self.fail_at = fail_at

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if index == self.fail_at:
            raise OSError("the disk is gone")
        noise = torch.rand(()) + random.random() + np.random.rand()
        return (super().__getitem__(index)[0] + noise.float(),)


def loaders(dataset: TensorDataset, generator: torch.Generator) -> dict[str, DataLoader[Any]]:
    sampler = RandomSampler(dataset, generator=generator)
    return {
        "its own generator": DataLoader(dataset, 4, shuffle=True, generator=generator),
        "the global generator": DataLoader(dataset, 4, shuffle=True),
        "a sampler with a generator": DataLoader(dataset, 4, sampler=sampler),
        "a batch sampler": DataLoader(dataset, batch_sampler=BatchSampler(sampler, 4, drop_last=False)),
    }


KINDS = list(loaders(TensorDataset(torch.zeros(1)), torch.Generator()))


def trace(model: nn.Module, generator: torch.Generator) -> dict[str, Any]:
    """Everything that collecting could have changed."""
    return {
        "modes": [module.training for module in model.modules()],
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "buffers": [id(buffer) for buffer in model.buffers()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "hooks": [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()],
        "kwargs hooks": [len(m._forward_pre_hooks_with_kwargs) for m in model.modules()],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),
        "numpy position": np.random.get_state()[2],
        "python": random.getstate(),
        "generator": generator.get_state(),
        "grad enabled": torch.is_grad_enabled(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
    }


def assert_same_trace(before: dict[str, Any], after: dict[str, Any]) -> None:
    for key, value in before.items():
        if isinstance(value, dict | list | Tensor) and key != "numpy":
            torch.testing.assert_close(after[key], value, rtol=0, atol=0, msg=key)
        else:
            assert after[key] == value, key


def trained_net() -> Net:
    """Build a network in the middle of training: with gradients, moved statistics and a layer in eval mode."""
    torch.manual_seed(3)
    model = Net()
    model(images(8)).sum().backward()
    model.norm.eval()
    return model


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.fc(input=x * scale)


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
