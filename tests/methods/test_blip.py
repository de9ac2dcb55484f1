"""BLIP: bits follow the formula and never fall, and no optimizer moves a parameter past its frozen bits."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgp.methods import Batch
from sgp.methods.blip import BLIP, BLIPSettings
from sgp.methods.fisher import compute_sample_fisher
from sgp.networks import MLP, LeNet, ResNet18

WIDTHS, CLASSES = (6, 8, 5), (3, 2, 4)
# Rounding of one float32, as a share of the bound.
ROUNDING = 2**-23

Optimizers = dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.5),
    "momentum and decay": lambda weights: torch.optim.SGD(weights, lr=0.2, momentum=0.9, weight_decay=0.1),
    "adam": lambda weights: torch.optim.Adam(weights, lr=0.05),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.05),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=0.05),
}


def make_batch(task: int, count: int = 40) -> Batch:
    generator = torch.Generator().manual_seed(task)
    labels = torch.randint(CLASSES[task], (count,), generator=generator)
    return torch.randn(count, WIDTHS[0], generator=generator) + labels.unsqueeze(1), labels


def make_method(**settings: Any) -> BLIP:
    torch.manual_seed(0)
    given = {"fisher_prior": 1e-6, "fisher_labels": "true"} | settings
    return BLIP(MLP(WIDTHS, CLASSES), BLIPSettings(**given), exclude=["heads.*"])


def make_log_likelihood(method: BLIP, task: int) -> Callable[[Batch], Tensor]:
    return lambda batch: -F.cross_entropy(method.network(batch[0], task), batch[1], reduction="none")


def train(
    method: BLIP, task: int, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int = 30
) -> None:
    optimizer = make(list(method.network.parameters()))
    method.attach(optimizer)
    inputs, labels = make_batch(task)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(method.network(inputs, task), labels).backward()
        optimizer.step()


def consolidate(method: BLIP, task: int) -> None:
    method.consolidate([make_batch(task)], make_log_likelihood(method, task))


def copy_weights(method: BLIP) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in method.network.named_parameters()}


def compute_bounds(method: BLIP) -> dict[str, float]:
    """Return the bounds of the MLP's parameters that have bits: 6 / sqrt(inputs) for weights, 1 for biases."""
    inputs = {f"hidden.{layer}": WIDTHS[layer] for layer in range(len(WIDTHS) - 1)}
    return {f"{layer}.weight": 6 / math.sqrt(n) for layer, n in inputs.items()} | {
        f"{layer}.bias": 1 for layer in inputs
    }


def compute_literally(
    F: float, old: float, bits: int, weight: float, bound: float, task: int
) -> tuple[int, float, float]:
    """Compute bits, weight and Fisher information of one number after a task by the formulas."""
    gain = 0.5 * math.log2((F + (task + 1) * old) / ((task + 2) * old))
    bits = min(bits + max(0, math.ceil(gain)), 20)
    grid = round(weight / bound * 2**bits) / 2**bits * bound if bits else 0.0
    return bits, grid, ((task + 1) * old + F) / (task + 2)


def test_bits_and_weights_are_those_of_the_formula_number_by_number() -> None:
    method = make_method(unfrozen="zero", fisher_prior=1e-4)
    olds = {
        name: [1e-4 * (6 if name.startswith("hidden.0") else 8)] * p.numel() for name, p in copy_weights(method).items()
    }
    counts = {name: [0] * len(old) for name, old in olds.items()}
    for position, task in enumerate((0, 1, 2, 1)):
        train(method, task, OPTIMIZERS["sgd"])
        before = copy_weights(method)
        parameters = {name: method.network.get_parameter(name) for name in compute_bounds(method)}
        fisher = compute_sample_fisher(
            method.network, parameters, [make_batch(task)], make_log_likelihood(method, task)
        )
        consolidate(method, task)
        for name, bound in compute_bounds(method).items():
            expected = [
                compute_literally(F, old, bits, weight, bound, position)
                for F, old, bits, weight in zip(
                    fisher[name].flatten().tolist(),
                    olds[name],
                    counts[name],
                    before[name].flatten().tolist(),
                    strict=True,
                )
            ]
            counts[name], grid, olds[name] = map(list, zip(*expected, strict=True))
            assert method.bits[name].flatten().tolist() == counts[name]
            found = method.network.get_parameter(name).detach().flatten()
            torch.testing.assert_close(found, torch.tensor(grid), rtol=1e-6, atol=ROUNDING * bound)
            torch.testing.assert_close(method.fisher[name].flatten(), torch.tensor(olds[name]), rtol=1e-5, atol=0)
    used = torch.cat([bits.flatten() for bits in method.bits.values()])
    assert len(used.unique()) > 5
    assert (used == 0).any()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_step_goes_past_the_frozen_bits_and_bits_never_fall(optimizer: str) -> None:
    method = make_method()
    train(method, 0, OPTIMIZERS[optimizer])
    consolidate(method, 0)
    for task in (1, 2, 0, 2):
        start, bits = copy_weights(method), {name: each.clone() for name, each in method.bits.items()}
        train(method, task, OPTIMIZERS[optimizer])
        moved = copy_weights(method)
        consolidate(method, task)
        for name, bound in compute_bounds(method).items():
            # Without a frozen bit it may change its sign as well.
            reach = torch.where(bits[name] == 0, 2 * bound, bound * 0.5 ** bits[name].double())
            assert ((moved[name] - start[name]).abs() <= reach + ROUNDING * bound).all()
            # Rounding goes no further either: the ends of the range are on every finer grid.
            assert ((copy_weights(method)[name] - start[name]).abs() <= reach + ROUNDING * bound).all()
            assert (moved[name].abs() <= bound * (1 - 0.5**20)).all()
            assert (method.bits[name] >= bits[name]).all()
            assert not torch.equal(moved[name], start[name])
    assert all((bits <= 20).all() for bits in method.bits.values())


def test_after_a_task_every_parameter_has_no_bit_behind_its_frozen_ones() -> None:
    method = make_method(unfrozen="zero")
    train(method, 0, OPTIMIZERS["adam"])
    consolidate(method, 0)
    for name, bound in compute_bounds(method).items():
        steps = method.network.get_parameter(name).detach().double() / bound * 2.0 ** method.bits[name].double()
        torch.testing.assert_close(steps, steps.round(), rtol=1e-6, atol=1e-9)


def test_parameters_with_all_bits_frozen_hardly_move_and_heads_do() -> None:
    method = make_method(fisher_prior=1e-25)
    train(method, 0, OPTIMIZERS["sgd"])
    consolidate(method, 0)
    start = copy_weights(method)
    train(method, 1, OPTIMIZERS["adam"])
    for name, bound in compute_bounds(method).items():
        full = method.bits[name] == 20
        assert full.float().mean() > 0.5
        change = (copy_weights(method)[name] - start[name]).abs()
        assert (change[full] <= bound * 2**-20 + ROUNDING * bound).all()
    assert not torch.equal(copy_weights(method)["heads.1.weight"], start["heads.1.weight"])
    assert not any(name.startswith("heads") for name in method.state_dict()["bits"])
    before = copy_weights(method)
    consolidate(method, 1)
    assert max(int(bits.max()) for bits in method.bits.values()) == 20
    for name, value in before.items():
        if name.startswith("heads"):
            assert torch.equal(copy_weights(method)[name], value)


def test_a_smaller_prior_freezes_more_and_keeps_old_outputs_better() -> None:
    bits, changes = [], []
    for prior in (1e-2, 1e-6, 1e-12):
        method = make_method(fisher_prior=prior)
        train(method, 0, OPTIMIZERS["sgd"])
        consolidate(method, 0)
        bits.append(sum(float(each.float().mean()) for each in method.bits.values()))
        start = method.network(make_batch(0)[0], 0).detach()
        train(method, 1, OPTIMIZERS["sgd"])
        changes.append(float((method.network(make_batch(0)[0], 0).detach() - start).norm()))
    assert bits == sorted(bits)
    assert changes[0] > 2 * changes[1] > 20 * changes[2]


def test_the_published_scale_of_gradients_is_another_prior() -> None:
    # Gradients of the mean over 62 states, squared: 62^2 times smaller, as is the published prior of 5e-18.
    small, ours = make_method(fisher_prior=5e-18), make_method(fisher_prior=5e-18 * 62**2)
    assert pytest.approx(1.92e-14, rel=2e-3) == 5e-18 * 62**2
    for task in (0, 1):
        for method in (small, ours):
            train(method, task, OPTIMIZERS["sgd"])
        ours.consolidate([make_batch(task)], make_log_likelihood(ours, task))
        small.consolidate([make_batch(task)], lambda b, task=task: make_log_likelihood(small, task)(b) / 62)
        for name, bits in ours.bits.items():
            assert torch.equal(bits, small.bits[name])


@pytest.mark.parametrize(("fan", "linear", "conv"), [("in", 3, 18), ("largest", 8, 40)])
def test_n_is_the_inputs_or_the_larger_side(fan: Any, linear: int, conv: int) -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.Conv2d(4, 40, 3, groups=2), nn.Conv2d(4, 32, 8), nn.LayerNorm(5))
    method = BLIP(net, BLIPSettings(fan=fan, fisher_prior=1e-9))
    scales = method._compute_scales(method._scan())
    n = {"0": linear, "1": conv, "2": 4 * 8 * 8}
    assert set(scales) == {f"{layer}.{leaf}" for layer in n for leaf in ("weight", "bias")}
    for layer, count in n.items():
        assert scales[f"{layer}.weight"].bound == pytest.approx(6 / math.sqrt(count))
        assert scales[f"{layer}.bias"].bound == 1
        assert scales[f"{layer}.weight"].prior == scales[f"{layer}.bias"].prior == pytest.approx(1e-9 * count)


def test_weights_are_brought_within_the_bound_at_first() -> None:
    method = make_method()
    with torch.no_grad():
        for parameter in method.network.parameters():
            parameter.mul_(1000)
    heads = copy_weights(method)["heads.0.weight"]
    method.attach(torch.optim.SGD(method.network.parameters(), lr=0.1))
    for name, bound in compute_bounds(method).items():
        largest = float(copy_weights(method)[name].abs().max())
        assert largest == pytest.approx(bound * (1 - 0.5**20), rel=1e-7)
        assert largest < bound
    assert torch.equal(copy_weights(method)["heads.0.weight"], heads)


def test_parameters_without_a_frozen_bit_are_zero_or_unchanged_and_may_move_freely() -> None:
    for unfrozen in ("zero", "keep"):
        method = make_method(unfrozen=unfrozen, fisher_prior=1e-3)
        train(method, 0, OPTIMIZERS["sgd"])
        before = copy_weights(method)
        consolidate(method, 0)
        none = {name: bits == 0 for name, bits in method.bits.items()}
        assert sum(int(each.sum()) for each in none.values()) > 0
        for name, where in none.items():
            expected = before[name][where] if unfrozen == "keep" else torch.zeros(int(where.sum()))
            assert torch.equal(copy_weights(method)[name][where], expected)
        with torch.no_grad():
            for parameter in method.network.parameters():
                parameter.fill_(-100)
        method.clamp_parameters()
        for name, bound in compute_bounds(method).items():
            reached = copy_weights(method)[name][none[name]]
            torch.testing.assert_close(reached, torch.full_like(reached, -bound * (1 - 0.5**20)))


def test_an_optimizer_that_trains_all_tasks_and_one_of_an_old_task() -> None:
    method = make_method()
    optimizer = torch.optim.SGD(method.network.parameters(), lr=0.5)
    method.attach(optimizer)
    consolidate(method, 0)
    start = copy_weights(method)
    with torch.no_grad():
        method.network.get_parameter("hidden.0.weight").fill_(100)
    optimizer.step()
    name, bound = "hidden.0.weight", compute_bounds(method)["hidden.0.weight"]
    reach = bound * 0.5 ** method.bits[name].double()
    assert ((copy_weights(method)[name] - start[name]).abs() <= reach + ROUNDING * bound).all()
    # Another one takes its place.
    method.attach(torch.optim.SGD(method.network.parameters(), lr=0.5))
    with torch.no_grad():
        method.network.get_parameter(name).fill_(100)
    optimizer.step()
    assert (copy_weights(method)[name] == 100).all()


def test_labels_are_drawn_from_the_output_by_default() -> None:
    found = []
    for labels in ("true", "drawn", "drawn"):
        method = make_method(fisher_labels=labels)
        torch.manual_seed(1)
        wrong = (make_batch(0)[0], torch.full((40,), 2))
        method.consolidate([wrong], make_log_likelihood(method, 0))
        found.append(method.fisher["hidden.0.weight"])
    assert torch.equal(found[1], found[2])
    assert not torch.allclose(found[0], found[1], rtol=0.1)


def test_the_fisher_information_is_that_of_a_network_without_dropout() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 3)).train()
    method = BLIP(net, BLIPSettings(fisher_labels="true"))
    consolidated = [make_batch(0)]

    def value(batch: Batch) -> Tensor:
        return -F.cross_entropy(net(batch[0]), batch[1], reduction="none")

    expected = compute_sample_fisher(net.eval(), dict(net.named_parameters()), consolidated, value)["0.weight"]
    net.train()
    method.consolidate(consolidated, value)
    torch.testing.assert_close(method.fisher["0.weight"], (expected + 5e-12 * 6) / 2)
    assert net[1].training


def test_only_the_set_number_of_batches_is_used() -> None:
    method, seen = make_method(fisher_batches=2), []

    def count(batch: Batch) -> Tensor:
        seen.append(len(batch[1]))
        return make_log_likelihood(method, 0)(batch)

    method.consolidate(iter([make_batch(0, 7)] * 5), count)
    assert seen == [7, 7]
    assert method.consolidation_batch == 100


@pytest.mark.parametrize("kind", [LeNet, ResNet18])
def test_convolutional_networks_and_parameters_without_bits_stay_as_the_first_task_left_them(kind: Any) -> None:
    torch.manual_seed(0)
    options = {"statistics": "stored"} if kind is ResNet18 else {}
    net = kind((3, 32, 32), (2, 2), **options)
    method = BLIP(net, BLIPSettings(), exclude=["heads.*"])
    inputs, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 0, 1])
    for task in (0, 1):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
        method.attach(optimizer)
        start = {name: value.clone() for name, value in net.state_dict().items()}
        net.train()
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(net(inputs + task, task), labels).backward()
            optimizer.step()
        changed = {name for name, value in net.state_dict().items() if not torch.equal(value, start[name])}
        plain = {name for name in start if "bn" in name or "shortcut.1" in name}
        assert bool(changed & plain) == (task == 0 and kind is ResNet18)
        assert {name for name in start if name.endswith("conv1.weight")} <= changed
        method.consolidate(
            [(inputs, labels)],
            lambda b, task=task: -F.cross_entropy(net(b[0], task), b[1], reduction="none"),
        )
    assert all(0 <= share < 1 for share in method.measure_free().values())
    assert "layer1.0.conv1" in method.measure_free() or kind is LeNet
    # So it is where the state is loaded.
    other = kind((3, 32, 32), (2, 2), **options)
    loaded = BLIP(other, BLIPSettings(), exclude=["heads.*"])
    loaded.load_state_dict(method.state_dict())
    other.load_state_dict(net.state_dict())
    other.train()(inputs + 5, 1)
    for name, buffer in other.named_buffers():
        assert torch.equal(buffer, net.get_buffer(name)), name


def test_a_task_without_information_freezes_nothing() -> None:
    method = BLIP(MLP(WIDTHS, (1, 3)), BLIPSettings(), exclude=["heads.*"])
    before = copy_weights(method)
    inputs, labels = torch.randn(8, WIDTHS[0]), torch.zeros(8, dtype=torch.long)
    method.consolidate([(inputs, labels)], make_log_likelihood(method, 0))
    assert not any(bits.any() for bits in method.bits.values())
    for name, value in copy_weights(method).items():
        assert torch.equal(value, before[name])


def test_a_nan_raises_an_error_and_nothing_changes() -> None:
    method = make_method()
    before = copy_weights(method)
    with pytest.raises(ValueError, match=r"Fisher information of 'hidden.0.weight' is not finite"):
        method.consolidate([(torch.full((2, 6), math.inf), torch.tensor([0, 1]))], make_log_likelihood(method, 0))
    with pytest.raises(ValueError, match="no examples"):
        method.consolidate([], make_log_likelihood(method, 0))
    assert (method.tasks, method.bits) == (0, {})
    for name, value in copy_weights(method).items():
        assert torch.equal(value, before[name])


def test_a_layer_that_trains_from_the_second_task_on_begins_without_bits() -> None:
    method = make_method()
    layer = method.network.get_submodule("hidden.1")
    layer.requires_grad_(False)
    train(method, 0, OPTIMIZERS["sgd"])
    consolidate(method, 0)
    assert set(method.bits) == set(method.anchor) == {"hidden.0.weight", "hidden.0.bias"}
    layer.requires_grad_(True)
    start = copy_weights(method)
    train(method, 1, OPTIMIZERS["sgd"])
    assert not torch.equal(copy_weights(method)["hidden.1.weight"], start["hidden.1.weight"])
    consolidate(method, 1)
    assert "hidden.1.weight" in method.bits


def test_a_state_loads_into_another_network_to_the_bit() -> None:
    method = make_method()
    train(method, 0, OPTIMIZERS["sgd"])
    consolidate(method, 0)
    other = make_method()
    other.load_state_dict(method.state_dict())
    other.network.load_state_dict(method.network.state_dict())
    for each in (method, other):
        train(each, 1, OPTIMIZERS["adam"])
        consolidate(each, 1)
    assert all(torch.equal(value, copy_weights(other)[name]) for name, value in copy_weights(method).items())
    assert all(torch.equal(bits, other.bits[name]) for name, bits in method.bits.items())
    stated = {name: sum(each.nbytes for each in method.state_dict()[part].values()) for name, part in PARTS.items()}
    assert method.count_bytes() == stated
    assert stated["anchors"] == stated["fisher"] == 4 * stated["bits"]
    assert method.compute_capacity() == 100
    stranger = BLIP(MLP((6, 9), CLASSES), BLIPSettings(), exclude=["heads.*"])
    with pytest.raises(ValueError, match=r"of another network: 'hidden.0.weight' \(8, 6\)"):
        stranger.load_state_dict(method.state_dict())


PARTS = {"bits": "bits", "fisher": "fisher", "anchors": "anchor"}


def test_the_method_does_not_keep_the_network_alive() -> None:
    method = make_method()
    optimizer = torch.optim.SGD(method.network.parameters(), lr=0.1)
    method.attach(optimizer)
    network = method.network
    del method
    with torch.no_grad():
        network.get_parameter("hidden.0.weight").fill_(100)
    optimizer.step()
    assert (network.get_parameter("hidden.0.weight") == 100).all()


def test_more_bits_than_the_precision_has_raise_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"max_bits must be at most 23 for 'hidden.0.weight' \(torch.float32\), got 24"
    ):
        make_method(max_bits=24)
