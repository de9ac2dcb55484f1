"""Write ``memory-format-1.safetensors``, the file that every later version must be able to read.

Run once, with the version that introduced the format; a new format gets a new file beside the old one::

    python tests/data/make_memory.py tests/data/memory-format-1.safetensors
"""

import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from sgp import GradientMemory


class Network(nn.Module):
    """A grouped convolution, a norm layer with statistics, layers that share a subspace, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 6, 3, groups=2)
        self.norm = nn.BatchNorm1d(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.out = nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.conv(x)).mT
        hidden = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.out(hidden.mean(1))


def network() -> Network:
    """Return a network with the same weights on every machine and in every version of PyTorch."""
    model = Network()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(waves(*parameter.shape, phase=i))
        assert model.norm.running_mean is not None
        model.norm.running_mean.copy_(waves(6, phase=100))
    return model


def waves(*shape: int, phase: float) -> Tensor:
    """Return deterministic numbers that do not depend on a random generator."""
    positions = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(positions * 1.7 + phase).reshape(shape).float()


def inputs(task: int) -> Tensor:
    """Return ten sequences that span few dimensions, which differ between tasks."""
    mixing = waves(2, 4, phase=7 * task)
    return torch.einsum("nkt,kc->nct", waves(10, 2, 8, phase=50 + task), mixing)


def memory_of(model: nn.Module) -> GradientMemory:
    return GradientMemory(model, threshold=0.9, alpha=5)


if __name__ == "__main__":
    torch.set_num_threads(1)
    memory = memory_of(network())
    for task in range(2):
        memory.update([inputs(task)])
    memory.save(Path(sys.argv[1]))
    for name, subspace in memory.subspaces.items():
        print(name, subspace.rank.tolist(), [round(float(x), 4) for x in subspace.importance.flatten()])
