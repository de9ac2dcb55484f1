"""The published code's updates and steps, rewritten here: the slow forms that measurements compare with.

Representations are [d, n] with one input per column, as there. Convolutions have theirs in float64 and
linear layers in float32, because that is what the published patch loop and activations give.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Array = NDArray[Any]


@dataclass(frozen=True)
class Memory:
    """Bases and importances of one layer. basis: [d, k]; importance: [k]."""

    basis: Array
    importance: Array


def first_update(R: Array, threshold: float, alpha: float) -> Memory:
    """Return the memory after task 1: one SVD, and a rank one below that of Eq. 1. R: [d, n]."""
    U, S, _ = np.linalg.svd(R, full_matrices=False)
    share = np.cumsum(S**2) / np.sum(S**2)
    r = int(np.sum(share < threshold))
    return Memory(U[:, :r], _importance(S[:r], alpha))


def next_update(memory: Memory, R: Array, threshold: float, alpha: float) -> Memory:
    """Return the memory after a later task: three SVDs. R: [d, n]."""
    M, k = memory.basis, memory.basis.shape[1]
    # The first SVD is there for the total energy alone.
    _, S, _ = np.linalg.svd(R, full_matrices=False)
    total = np.sum(S**2)

    # The second gives the importance of the old bases (Eq. 6 and 7).
    inside = np.dot(np.dot(M, M.T), R)
    U_inside, S_inside, _ = np.linalg.svd(inside, full_matrices=False)
    coefficients = np.dot(M.T, U_inside[:, :k])
    surrogate = np.sqrt(np.dot(coefficients**2, S_inside[:k] ** 2))

    # The third gives the new bases (Eq. 4 and 5).
    residual = R - inside
    U, S, _ = np.linalg.svd(residual, full_matrices=False)
    held = (total - np.sum(S**2)) / total
    r = 0
    while r < len(S) and held < threshold:
        held += S[r] ** 2 / total
        r += 1

    task = _importance(np.concatenate([surrogate, S[:r]]), alpha)
    importance = np.concatenate([np.clip(memory.importance + task[:k], 0, 1), task[k:]])
    basis = np.hstack([M, U[:, :r]])
    d = R.shape[0]
    return Memory(basis[:, :d], importance[:d])


def _importance(sigma: Array, alpha: float) -> Array:
    scaled: Array = (alpha + 1) * sigma / (alpha * sigma + np.max(sigma))
    return scaled


def projector(basis: Tensor, importance: Tensor) -> Tensor:
    """Compute the dense P = M diag(lambda) M^T, once per task. basis: [d, k], importance: [k] -> [d, d]."""
    return basis @ torch.diag(importance) @ basis.T


def project_dense(model: nn.Module, projectors: Mapping[str, Tensor]) -> None:
    """After backward: G - G P on each protected weight, no gradient for what is frozen (norm layers).

    projectors: module name -> [d, d].
    """
    for name, module in model.named_modules():
        if name in projectors:
            assert isinstance(module.weight, nn.Parameter)
            assert module.weight.grad is not None
            gradient = module.weight.grad
            matrix = gradient.view(gradient.shape[0], -1)
            module.weight.grad = gradient - torch.mm(matrix, projectors[name]).view_as(gradient)
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()


class DenseAdam:
    """The published Adam-GP: Adam by plain tensor operations, its direction D replaced by D - D P, P dense.

    Biases of protected layers do not move; all else, the heads, takes the ordinary step. The published
    counter goes up once per PPO update; here it goes up once per step, which costs the same.

    projectors: module name -> [d, d].
    """

    def __init__(
        self,
        model: nn.Module,
        projectors: Mapping[str, Tensor],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-5,
    ) -> None:
        self.lr, self.betas, self.eps = lr, betas, eps
        self.parameters = dict(model.named_parameters())
        self.projectors = {f"{name}.weight": P for name, P in projectors.items()}
        self.frozen = {f"{name}.bias" for name in projectors}
        self.first = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.steps = 0

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One step of every parameter that has a gradient."""
        self.steps += 1
        beta_1, beta_2 = self.betas
        for name, parameter in self.parameters.items():
            if parameter.grad is None or name in self.frozen:
                continue
            m, v = self.first[name], self.second[name]
            m.mul_(beta_1).add_(parameter.grad, alpha=1 - beta_1)
            v.mul_(beta_2).addcmul_(parameter.grad, parameter.grad, value=1 - beta_2)
            m_hat = m / (1 - beta_1**self.steps)
            v_hat = v / (1 - beta_2**self.steps)
            direction = m_hat / (v_hat.sqrt() + self.eps)
            if name in self.projectors:
                matrix = direction.view(direction.shape[0], -1)
                direction = direction - torch.mm(matrix, self.projectors[name]).view_as(direction)
            parameter.sub_(direction, alpha=self.lr)


class AlexNet(nn.Module):
    """The published network: dropout and pooling as torch has them, and every head computed at every step."""

    def __init__(self, heads: int = 10, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 64, 4, bias=False), nn.BatchNorm2d(64, track_running_stats=False)
        self.conv2, self.norm2 = nn.Conv2d(64, 128, 3, bias=False), nn.BatchNorm2d(128, track_running_stats=False)
        self.conv3, self.norm3 = nn.Conv2d(128, 256, 2, bias=False), nn.BatchNorm2d(256, track_running_stats=False)
        self.fc1, self.norm4 = nn.Linear(1024, 2048, bias=False), nn.BatchNorm1d(2048, track_running_stats=False)
        self.fc2, self.norm5 = nn.Linear(2048, 2048, bias=False), nn.BatchNorm1d(2048, track_running_stats=False)
        self.light, self.heavy = nn.Dropout(0.2), nn.Dropout(0.5)
        self.pool, self.relu = nn.MaxPool2d(2), nn.ReLU()
        self.heads = nn.ModuleList(nn.Linear(2048, classes, bias=False) for _ in range(heads))

    def forward(self, x: Tensor) -> list[Tensor]:
        """Logits of all heads. x: [n, 3, 32, 32]."""
        x = self.pool(self.light(self.relu(self.norm1(self.conv1(x)))))
        x = self.pool(self.light(self.relu(self.norm2(self.conv2(x)))))
        x = self.pool(self.heavy(self.relu(self.norm3(self.conv3(x)))))
        x = self.heavy(self.relu(self.norm4(self.fc1(x.flatten(1)))))
        x = self.heavy(self.relu(self.norm5(self.fc2(x))))
        return [head(x) for head in self.heads]
