"""The algorithm in one file computes what GradientMemory computes."""

import copy
import math

import pytest
import torch
from torch import nn

import sgp

pytest.importorskip("sklearn", reason="the example trains on digits; of the extra 'benchmarks'")
from examples import sgp_in_one_file as example

LR, THRESHOLD = 0.05, 0.95


@pytest.mark.parametrize("alpha", [0.0, 10.0, math.inf])
def test_two_tasks_end_with_the_projections_and_weights_of_gradient_memory(alpha: float) -> None:
    network = example.build_network(seed=0)
    twin = copy.deepcopy(network)
    memory = example.Memory()
    reference = sgp.GradientMemory(twin, threshold=THRESHOLD, alpha=alpha)
    optimizer = torch.optim.SGD(twin.parameters(), lr=LR)
    reference.attach(optimizer)
    start = copy.deepcopy(network.state_dict())
    for (x, y), _ in example.load_tasks(2, seed=0):
        for batch in range(0, 400, 10):
            rows = slice(batch, batch + 10)
            example.train_step(network, memory, x[rows], y[rows], LR)
            optimizer.zero_grad()
            nn.functional.cross_entropy(twin(x[rows]), y[rows]).backward()
            optimizer.step()
        example.update_memory(memory, network, x, THRESHOLD, alpha)
        reference.update(x.split(100))
        for name, layer in network.named_modules():
            if isinstance(layer, nn.Linear):
                gradient = torch.randn_like(layer.weight)
                projected = example.project_gradient(gradient, *memory[layer])
                assert (gradient - projected).norm() > 0.1 * gradient.norm()
                torch.testing.assert_close(reference.project(gradient, name), projected, rtol=0, atol=1e-6)
    for name, weight in network.state_dict().items():
        assert (weight - start[name]).abs().max() > 1e-2
        torch.testing.assert_close(twin.state_dict()[name], weight, rtol=0, atol=1e-5)


def test_a_basis_is_added_only_where_the_old_ones_capture_too_little() -> None:
    sigma = torch.tensor([3.0, 2.0, 1.0]).double()
    energy = sigma.square().sum()
    counts = [example.count_bases(sigma, torch.zeros(()).double(), energy, t) for t in (0.5, 0.9, 1.0)]
    assert counts == [1, 2, 3]
    assert example.count_bases(sigma, energy, 2 * energy, threshold=0.5) == 0
