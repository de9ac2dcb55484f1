"""The mean of weights over steps, and that it obeys the projection."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sgp import GradientMemory
from sgp.experiments.averaging import WeightAverage
from sgp.networks import MLP


def test_the_mean_is_the_closed_form() -> None:
    model = nn.Linear(3, 2)
    average = WeightAverage(model, 0.9)
    passed = []
    torch.manual_seed(0)
    for _ in range(20):
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 3))
        passed.append(model.weight.detach().clone())
        average.update()
    # The weights before the first step have no share.
    shares = [0.1 * 0.9 ** (20 - step) / (1 - 0.9**20) for step in range(1, 21)]
    assert sum(shares) == pytest.approx(1)
    expected = sum(share * weight.double() for share, weight in zip(shares, passed, strict=True))
    torch.testing.assert_close(average.state_dict()["average"]["weight"].double(), expected, rtol=1e-5, atol=1e-6)


def test_the_mean_is_applied_for_a_while_and_training_goes_on_from_its_own_weights() -> None:
    model = nn.Linear(3, 2)
    average = WeightAverage(model, 0.5)
    start = model.weight.detach().clone()
    for _ in range(2):
        with torch.no_grad():
            model.weight.add_(1.0)
        average.update()
    own = model.weight.detach().clone()
    mean = start + 5 / 3  # a third of the first step, two of the second
    with average.use():
        torch.testing.assert_close(model.weight.detach(), mean)
    assert torch.equal(model.weight, own)
    with pytest.raises(RuntimeError, match="inside"), average.use():
        raise RuntimeError("inside")
    assert torch.equal(model.weight, own)
    average.copy_to_network()
    torch.testing.assert_close(model.weight.detach(), mean)


def test_what_is_kept_lies_a_share_of_the_way_back_to_the_old_weights() -> None:
    torch.manual_seed(0)
    model = MLP((3, 4), (2, 2))
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    average = WeightAverage(model, 0.5, interpolation_weight=0.25, new=["heads.*"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    average.update()
    average.copy_to_network()
    for name, tensor in model.state_dict().items():
        # The mean of one step is that step; heads have no past to go back to.
        torch.testing.assert_close(tensor, old[name] + (1.0 if name.startswith("heads.") else 0.75))


def test_stored_statistics_are_averaged_and_counts_are_not() -> None:
    model = nn.BatchNorm1d(2)
    average = WeightAverage(model, 0.5)
    for _ in range(2):
        model(torch.full((4, 2), 10.0))
        average.update()
    average.copy_to_network()
    torch.testing.assert_close(model.running_mean, torch.full((2,), 1.6))  # a third of 1.0, two of 1.9
    assert int(model.num_batches_tracked) == 2  # type: ignore[arg-type]


def test_it_goes_on_from_its_state_and_keeps_the_order_of_memory() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    average = WeightAverage(model, 0.9, interpolation_weight=0.25)
    with torch.no_grad():
        model.weight.add_(1.0)
    average.update()
    again = WeightAverage(model, 0.9, interpolation_weight=0.25)
    again.load_state_dict(
        {
            part: {name: tensor.contiguous() for name, tensor in tensors.items()}
            for part, tensors in average.state_dict().items()
        }
    )
    with torch.no_grad():
        model.weight.add_(1.0)
    average.update()
    again.update()
    assert set(average.state_dict()) == {"average", "averaged", "old"}
    for part, tensors in average.state_dict().items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, again.state_dict()[part][name])
            assert tensor.stride() == again.state_dict()[part][name].stride()


@pytest.mark.parametrize("interpolation_weight", [0.0, 0.2])
def test_the_averaged_change_obeys_the_projection(interpolation_weight: float) -> None:
    torch.manual_seed(0)
    model = MLP((20, 30, 30), (4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = GradientMemory(model, threshold=0.9, alpha=float("inf"), exclude=["heads.*"])
    memory.attach(optimizer)
    old = torch.randn(50, 5) @ torch.randn(5, 20)
    new = torch.randn(64, 20)
    labels = torch.randint(4, (64,))
    memory.update([old])
    before = {
        name: layer.weight.detach().clone() for name, layer in model.named_modules() if isinstance(layer, nn.Linear)
    }
    biases = {
        name: layer.bias.detach().clone() for name, layer in model.named_modules() if isinstance(layer, nn.Linear)
    }
    average = WeightAverage(model, 0.9, interpolation_weight=interpolation_weight)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(new, 1), labels).backward()
        optimizer.step()
        average.update()
    last = model.hidden[0].weight.detach().clone()
    average.copy_to_network()
    assert not torch.equal(last, model.hidden[0].weight)
    for name in ("hidden.0", "hidden.1"):
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        change = torch.cat([layer.weight - before[name], (layer.bias - biases[name]).unsqueeze(1)], dim=1).detach()
        basis = memory.subspaces[name].basis[0]
        assert float(change.norm()) > 0.01
        assert float((change @ basis).norm()) < 1e-5 * float(change.norm())
    check = memory.check(old)
    assert max(layer.leak for layer in check.layers) < 1e-5
