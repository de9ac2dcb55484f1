"""Protected layers and their parameters."""

import torch
from torch import nn

import sgp


def test_a_fingerprint_differs_after_any_change_of_bits() -> None:
    layer = nn.Linear(4, 3)
    (weight,) = (each.weight for each in sgp.GradientMemory(layer, threshold=0.9).layers.values())
    seen = [weight.compute_fingerprint()]
    with torch.no_grad():
        layer.weight[0, 0] += 1e-6
        seen.append(weight.compute_fingerprint())
        layer.weight.copy_(layer.weight.flip(0))  # the same values in other places
        seen.append(weight.compute_fingerprint())
    assert len(set(seen)) == 3
    assert weight.compute_fingerprint() == seen[-1]


def test_a_parameter_that_was_replaced_is_found() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    memory = sgp.GradientMemory(model, threshold=0.9, alpha=float("inf"))
    memory.update([torch.randn(2, 4)])
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    hook = memory.attach(optimizer)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    assert hook.modes == {"0": "step"}
    assert memory.check(torch.randn(2, 4)).leak < 1e-4


def test_the_subspace_follows_the_model_to_another_precision() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    memory = sgp.GradientMemory(model, threshold=0.9)
    memory.update([torch.randn(2, 4)])
    (layer,) = memory.layers.values()
    assert layer.get_bases() is memory.subspaces["0"]
    model.double()
    assert layer.get_bases().basis.dtype == torch.float64
