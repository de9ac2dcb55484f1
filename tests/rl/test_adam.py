"""Adam has the step counter of the published Adam-GP."""

import math

import torch
from torch import nn
from torch.optim import Adam

import sgp
from sgp.rl.adam import AdamByUpdate


def steps(optimizer_class: type[Adam], gradients: list[list[float]], per_update: int | None) -> torch.Tensor:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = optimizer_class([parameter], lr=0.1, eps=1e-5)
    for number, gradient in enumerate(gradients):
        if per_update is not None and isinstance(optimizer, AdamByUpdate):
            optimizer.update = number // per_update + 1
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    return parameter.detach()


def test_the_powers_of_beta_change_once_in_an_update_and_the_moments_at_every_step() -> None:
    gradients = [[1.0, -2.0], [0.5, 3.0], [-1.0, 0.25], [2.0, 2.0], [0.1, -0.7]]
    theta, m, v = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
    for number, gradient in enumerate(gradients):
        t = number // 2 + 1
        for i, g in enumerate(gradient):
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.999 * v[i] + 0.001 * g * g
            theta[i] -= 0.1 * (m[i] / (1 - 0.9**t)) / (math.sqrt(v[i] / (1 - 0.999**t)) + 1e-5)
    torch.testing.assert_close(steps(AdamByUpdate, gradients, 2), torch.tensor(theta, dtype=torch.float64))


def test_with_one_step_in_an_update_it_is_adam() -> None:
    gradients = [[1.0, -2.0], [0.5, 3.0], [-1.0, 0.25]]
    torch.testing.assert_close(steps(AdamByUpdate, gradients, 1), steps(Adam, gradients, None))


def test_hooks_run_once_in_a_step_also_where_there_is_a_plain_adam() -> None:
    Adam([nn.Parameter(torch.zeros(1))])  # from here on torch runs hooks around Adam's own step too
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    memory = sgp.GradientMemory(model, threshold=0.9, alpha=3.0)
    memory.update([torch.randn(30, 6)])
    optimizer = AdamByUpdate(model.parameters(), lr=0.1)
    handle = memory.attach(optimizer)
    for _ in range(3):
        model(torch.randn(5, 6)).square().sum().backward()
        optimizer.step()
    assert handle.steps == 3
