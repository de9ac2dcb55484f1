"""Synaptic intelligence: omega is each parameter's reduction of the loss, and importances follow from it."""

from typing import Any

import pytest
import torch
from methods.penalty import compute_penalty
from torch import Tensor, nn
from torch.nn import functional as F

from sgp.methods.si import SI, SISettings
from sgp.networks import MLP

CURVATURE = torch.tensor([4.0, 1.0, 0.25, 0.0])


class Point(nn.Module):
    """Four weights with a quadratic loss of known curvature and its minimum at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def compute_loss(self) -> Tensor:
        return (CURVATURE * (self.weight - 1).square()).sum() / 2


def make_method(**settings: Any) -> SI:
    return SI(Point(), SISettings(**({"strength": 0.5, "damping": 0.01} | settings)))


def descend(method: SI, optimizer: torch.optim.Optimizer, steps: int, *, parts: int = 1, clip: float = 0.0) -> None:
    model = method.network
    assert isinstance(model, Point)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(parts):
            (model.compute_loss() / parts).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def make_optimizer(method: SI, kind: str, lr: float) -> torch.optim.Optimizer:
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD,
        "momentum": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9),
        "adam": torch.optim.Adam,
    }
    optimizer: torch.optim.Optimizer = kinds[kind](method.network.parameters(), lr=lr)
    method.attach(optimizer)
    return optimizer


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize(("parts", "clip"), [(1, 0.0), (3, 0.0), (1, 0.5)])
def test_omega_is_the_decrease_of_the_loss_along_the_way_to_first_order(kind: str, parts: int, clip: float) -> None:
    errors = []
    for lr in (0.01, 0.001):
        method = make_method()
        model = method.network
        assert isinstance(model, Point)
        optimizer = make_optimizer(method, kind, lr)
        descend(method, optimizer, round(1 / lr), parts=parts, clip=clip)
        # The loss is a sum over parameters, so each one's part is known.
        decrease = (CURVATURE * (1 - (model.weight.detach() - 1).square())) / 2
        errors.append(float((method.path["weight"] - decrease).abs().max()))
        assert float(decrease.sum()) > 0.5
    assert errors[1] < 0.05
    # First order: a tenth of the step has a tenth of the error.
    assert errors[1] == pytest.approx(errors[0] / 10, rel=0.35)


@pytest.mark.parametrize("parts", [1, 3])
def test_the_penalty_is_no_part_of_omega(parts: int) -> None:
    method = make_method(strength=5.0)
    optimizer = make_optimizer(method, "sgd", 0.001)
    descend(method, optimizer, 300)
    method.consolidate([], lambda batch: batch[0])
    model = method.network
    assert isinstance(model, Point)
    start = model.compute_loss().item()
    descend(method, optimizer, 300, parts=parts)
    assert float(method.path["weight"].sum()) == pytest.approx(start - model.compute_loss().item(), rel=0.02)


def test_importance_is_omega_over_the_squared_change_and_never_negative() -> None:
    method = make_method()
    method.attach(torch.optim.SGD(method.network.parameters(), lr=0.1))
    with torch.no_grad():
        method.network.get_parameter("weight").copy_(torch.tensor([1.0, 0.5, 0.0, 0.2]))
    omega = torch.tensor([2.0, 0.3, 0.1, -1.0])
    method.path["weight"] = omega.clone()
    method.consolidate([], lambda batch: batch[0])
    expected = torch.tensor([2.0 / 1.01, 0.3 / 0.26, 0.1 / 0.01, 0.0])
    torch.testing.assert_close(method.importance["weight"], expected)
    assert torch.equal(method.anchor["weight"], method.network.get_parameter("weight"))
    assert not method.path["weight"].any()
    # A second task adds to it.
    method.path["weight"] = omega.clone()
    method.consolidate([], lambda batch: batch[0])
    torch.testing.assert_close(method.importance["weight"], expected + omega.clamp(min=0) / 0.01)


def test_the_gradient_that_is_added_is_that_of_the_penalty() -> None:
    method = make_method()
    descend(method, make_optimizer(method, "sgd", 0.1), 5)
    method.consolidate([], lambda batch: batch[0])
    model = method.network
    assert isinstance(model, Point)
    with torch.no_grad():
        model.weight += 0.3
    omega, anchor = method.importance["weight"], method.anchor["weight"]
    torch.testing.assert_close(compute_penalty(method), 0.5 * (omega * (model.weight - anchor).square()).sum())
    (expected,) = torch.autograd.grad(model.compute_loss() + compute_penalty(method), model.weight)
    model.zero_grad()
    model.compute_loss().backward()
    torch.testing.assert_close(model.weight.grad, expected)


def test_important_parameters_stay_and_others_move() -> None:
    model = Point()
    method = SI(model, SISettings(strength=10.0))
    optimizer = make_optimizer(method, "sgd", 0.05)
    descend(method, optimizer, 50)
    method.consolidate([], lambda batch: batch[0])
    before = model.weight.detach().clone()
    for _ in range(50):
        optimizer.zero_grad()
        (model.weight.sum() * -1.0).backward()
        optimizer.step()
    moved = (model.weight.detach() - before).abs()
    assert moved[0] < moved[1] < 0.1 * moved[3]


def test_heads_have_no_penalty_and_bytes_are_those_of_the_state() -> None:
    net = MLP((6, 8), (3, 2))
    method = SI(net, SISettings(), exclude=["heads.*"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    inputs = torch.randn(8, 6)
    for task, classes in enumerate((3, 2)):
        method.attach(optimizer)
        optimizer.zero_grad()
        F.cross_entropy(net(inputs, task), torch.arange(8) % classes).backward()
        optimizer.step()
        method.consolidate([], lambda batch: batch[0])
        state = method.state_dict()
        tensors = [tensor for part in state.values() for tensor in part.values()]
        assert sum(method.count_bytes().values()) == sum(tensor.nbytes for tensor in tensors) == 3 * 4 * (6 * 8 + 8)
        assert method.importance.keys() == {"hidden.0.weight", "hidden.0.bias"}


def test_a_task_with_one_class_gives_nothing() -> None:
    net = MLP((6, 8), (1,))
    method = SI(net, SISettings())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    method.attach(optimizer)
    F.cross_entropy(net(torch.randn(8, 6), 0), torch.zeros(8, dtype=torch.long)).backward()
    optimizer.step()
    method.consolidate([], lambda batch: batch[0])
    assert not any(value.any() for value in method.importance.values())
