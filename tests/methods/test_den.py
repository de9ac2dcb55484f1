"""DEN: each phase moves, adds, removes and splits the units that it should."""

from typing import Any

import pytest
import torch
from methods.growth import NETWORKS, consolidate, get_excluded, get_logits, get_shape, learn, make_batch, make_network
from torch import Tensor
from torch.nn import functional as F

from sgp.methods import Moment
from sgp.methods.den import DEN, DENSettings
from sgp.networks import MLP
from sgp.networks.widen import mask_new_entries

START = Moment(0, 0.0, 0.0)


def make_method(kind: str = "mlp", **settings: Any) -> DEN:
    given: dict[str, Any] = {"head_epochs": 1, "expand_epochs": 1, "split_epochs": 1, "expand_units": 3}
    return DEN(make_network(kind), DENSettings(**(given | settings)), exclude=get_excluded(kind))


def copy_weights(method: DEN) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in method.network.named_parameters()}


def make_after_first_task(**settings: Any) -> DEN:
    method = make_method(**settings)
    learn(method, 0)
    consolidate(method, 0)
    return method


def test_the_first_task_decays_and_shrinks_its_weights() -> None:
    method, batch = make_method(l1=0.003, l2=0.1), make_batch(0)
    method.begin_task(0, [batch])
    optimizer = method.build_optimizer(torch.optim.SGD, 0.1)
    method.attach(optimizer)
    before = copy_weights(method)
    gradients = torch.autograd.grad(
        F.cross_entropy(method.network(batch[0], 0), batch[1]), [method.network.hidden[0].weight]
    )
    method.step(batch, 0, START, optimizer)
    moved = before["hidden.0.weight"] - 0.1 * (gradients[0] + 0.1 * before["hidden.0.weight"])
    wanted = moved.sign() * (moved.abs() - 0.003).clamp(min=0)
    torch.testing.assert_close(method.network.hidden[0].weight.detach(), wanted)
    assert 0 < method.network.hidden[0].weight.eq(0).float().mean() < 1
    assert torch.equal(method.network.heads[1].weight, before["heads.1.weight"])  # of a task to come


def make_sparse() -> DEN:
    """Build a network whose upper units 0 and 1 read units 0, 2 and 3 of the lower layer; tests set the head."""
    method = make_after_first_task(l1=0.01)
    lower, upper = method.network.hidden
    with torch.no_grad():
        upper.weight.fill_(0.005)  # too small to be connections
        upper.weight[0, 0] = upper.weight[0, 2] = -1
        upper.weight[1, 3] = 1
        upper.weight[2, 5] = 1
        lower.weight.fill_(1)
    method._ends = ["heads.1"]
    return method


def test_units_are_selected_along_paths_of_weights_from_the_head() -> None:
    method = make_sparse()
    with torch.no_grad():
        method.network.heads[1].weight.zero_()
        method.network.heads[1].weight[0, 0] = -0.5
        method.network.heads[1].weight[1, 1] = 0.5
    selected = method._select_units()
    assert selected["hidden.1"].nonzero().flatten().tolist() == [0, 1]
    assert selected["hidden.0"].nonzero().flatten().tolist() == [0, 2, 3]


def test_a_head_without_weights_selects_nothing() -> None:
    method = make_sparse()
    with torch.no_grad():
        method.network.heads[1].weight.zero_()
    assert not any(mask.any() for mask in method._select_units().values())


def test_selection_goes_through_flattened_maps_and_residual_sums() -> None:
    for kind in ("lenet", "resnet18-stored"):
        method = make_method(kind)
        method.begin_task(0, [make_batch(0, get_shape(kind))])
        assert all(mask.all() for mask in method._select_units().values()), kind
        method.network.heads[0].weight.data.zero_()
        # One pixel of the last map's channel 1.
        pixels = 1 if kind == "lenet" else method.network.heads[0].in_features // 160
        method.network.heads[0].weight.data[0, pixels] = 1
        selected = method._select_units()
        top = "fc2" if kind == "lenet" else "layer4.1.conv2"
        assert selected[top].nonzero().flatten().tolist() == [1]
        # It was added to units of layers that other layers read as well.
        if kind != "lenet":
            assert selected["layer4.0.shortcut.0"].all()
        assert selected["conv1"].all()


def test_retraining_moves_only_the_head_and_weights_between_selected_units() -> None:
    method = make_after_first_task()
    learn(method, 1, steps=0)
    method.selected = {
        "hidden.0": torch.arange(16) < 5,
        "hidden.1": torch.arange(8) % 2 == 0,
    }
    optimizer = method.build_optimizer(torch.optim.SGD, 0.5)
    method.attach(optimizer)
    before = copy_weights(method)
    for _ in range(3):
        method.step(make_batch(1), 1, START, optimizer)
    moved = {name: each != before[name] for name, each in method.network.named_parameters()}
    assert moved["hidden.0.weight"][:5].any()
    assert not moved["hidden.0.weight"][5:].any()
    assert not moved["hidden.0.bias"][5:].any()
    assert moved["hidden.1.weight"][::2, :5].any()
    assert not moved["hidden.1.weight"][1::2].any()
    assert not moved["hidden.1.weight"][:, 5:].any()
    assert moved["heads.1.weight"].any()
    assert not moved["heads.0.weight"].any()


def test_retraining_decays_and_shrinks_what_it_trains_and_penalises_drift() -> None:
    method = make_after_first_task(drift=0.7, l1=0.003, l2=0.1)
    learn(method, 1, steps=0)
    chosen = torch.arange(16) < 5
    method.selected = {"hidden.0": chosen, "hidden.1": torch.ones(8, dtype=torch.bool)}
    batch, optimizer = make_batch(1), method.build_optimizer(torch.optim.SGD, 0.1)
    method.attach(optimizer)
    weight, head = method.network.hidden[0].weight, method.network.heads[1].weight
    anchor = weight.detach().clone()
    with torch.no_grad():
        weight += 0.01
    start, head_start = weight.detach().clone(), head.detach().clone()
    loss = F.cross_entropy(method.network(batch[0], 1), batch[1])
    gradient, head_gradient = torch.autograd.grad(loss, [weight, head])
    method.step(batch, 1, START, optimizer)
    wanted = F.softshrink(start - 0.1 * (gradient + 0.1 * start + 0.7 * (start - anchor)), 0.003)
    torch.testing.assert_close(weight.detach()[chosen], wanted[chosen])
    assert torch.equal(weight.detach()[~chosen], start[~chosen])
    # The head is new, so it has no weights to drift from.
    torch.testing.assert_close(
        head.detach(), F.softshrink(head_start - 0.1 * (head_gradient + 0.1 * head_start), 0.003)
    )


def test_a_new_head_is_trained_alone_and_larger_shrinkage_selects_fewer_units() -> None:
    counts = []
    for head_l1 in (0.0, 0.08, 10.0):
        method = make_after_first_task(head_l1=head_l1, head_epochs=3)
        before = copy_weights(method)
        learn(method, 1, steps=0)
        for name, each in method.network.named_parameters():
            assert each.requires_grad
            assert torch.equal(each, before[name]) == (not name.startswith("heads.1")), name
        counts.append(int(method.selected["hidden.1"].sum()))
    assert counts[0] == 8 > counts[1] > counts[2] == 0


def test_a_task_that_is_learned_well_adds_nothing() -> None:
    for limit, grown in ((100.0, False), (0.0, True)):
        method = make_after_first_task(loss_limit=limit, split_units=0, group_lasso=0.0)
        learn(method, 1)
        consolidate(method, 1)
        assert method.count_units() == {"hidden.0": 16 + 3 * grown, "hidden.1": 8 + 3 * grown}


def test_expansion_trains_what_is_new_and_shrinks_each_unit_as_a_group() -> None:
    method = make_after_first_task(loss_limit=0.0, split_units=0, group_lasso=0.01, l1=0.0)
    learn(method, 1)
    before = copy_weights(method)
    consolidate(method, 1)
    now = copy_weights(method)
    assert torch.equal(now["hidden.0.weight"][:16], before["hidden.0.weight"])
    assert torch.equal(now["hidden.1.weight"][:8, :16], before["hidden.1.weight"])
    assert not torch.equal(now["heads.1.weight"][:, :8], before["heads.1.weight"])
    method.sizes.pop("1")  # its units are new again
    norms = method._measure_new_units("hidden.1")
    parts = torch.cat([now["hidden.1.weight"][8:], now["hidden.1.bias"][8:, None]], dim=1)
    torch.testing.assert_close(norms, parts.norm(dim=1))


def test_the_group_step_shrinks_the_norm_by_its_amount() -> None:
    method = make_after_first_task(loss_limit=0.0, split_units=0)
    learn(method, 1)
    consolidate(method, 1)
    method.sizes.pop("1")  # its units are new again
    before, weights = method._measure_new_units("hidden.0"), copy_weights(method)
    method._shrink_new_units(0.1)
    torch.testing.assert_close(method._measure_new_units("hidden.0"), before - 0.1)
    assert torch.equal(method.network.hidden[0].weight[:16], weights["hidden.0.weight"][:16])
    method._shrink_new_units(100.0)
    assert not method._measure_new_units("hidden.0").any()


def test_new_units_without_weights_are_removed() -> None:
    method = make_after_first_task(loss_limit=0.0, split_units=0, group_lasso=100.0)
    learn(method, 1)
    consolidate(method, 1)
    assert method.count_units() == method.sizes["0"]


def make_drifted(choice: Any = "most", limit: float = 0.05, **settings: Any) -> DEN:
    """Return a method in its second task, with the upper layer's units 1, 3 and 6 moved by 0.2, 0.4 and 0.3."""
    settings = {"loss_limit": 100.0, "split_limit": limit, "split_units": 2, "split_choice": choice} | settings
    method = make_after_first_task(**settings)
    learn(method, 1, steps=0)
    with torch.no_grad():
        for unit, far in ((1, 0.2), (3, 0.4), (6, 0.3)):
            method.network.hidden[1].weight[unit, 0] += far
    return method


def test_drift_is_the_norm_of_a_units_change() -> None:
    method = make_drifted()
    torch.testing.assert_close(method.measure_drifts()["hidden.1"], torch.tensor([0, 0.2, 0, 0.4, 0, 0, 0.3, 0]))
    assert not method.measure_drifts()["hidden.0"].any()


@pytest.mark.parametrize(("choice", "split"), [("most", [3, 6]), ("least", [1, 6])])
def test_the_units_that_moved_most_are_split_and_as_published_those_that_moved_least(choice: str, split: Any) -> None:
    method = make_drifted(choice)
    assert method._choose_drifted("hidden.1", method.measure_drifts()["hidden.1"]).tolist() == split
    assert (
        make_drifted(choice, limit=0.5)._choose_drifted("hidden.1", method.measure_drifts()["hidden.1"]).tolist() == []
    )


def test_a_split_gives_the_old_unit_its_old_weights_and_the_task_the_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    method = make_drifted(split_units=3)
    anchor, now = method._anchor["hidden.1.weight"], method.network.hidden[1].weight.detach().clone()
    task, earlier = get_logits(method, 1), make_drifted(split_units=3, limit=100.0)
    monkeypatch.setattr(method, "_train", lambda *args: None)
    consolidate(method, 1)
    assert method.count_units() == {"hidden.0": 16, "hidden.1": 11}
    weight = method.network.hidden[1].weight
    assert torch.equal(weight[:8], anchor)
    assert torch.equal(weight[8:], now[[3, 6, 1]])
    # Only these units had moved: the task is answered as before by the copies, and so is the task before by the old.
    torch.testing.assert_close(get_logits(method, 1), task)
    earlier.network.hidden[1].weight.data.copy_(anchor)
    assert torch.equal(get_logits(method, 0), get_logits(earlier, 0))


def test_new_units_read_the_copy_of_a_split_unit_and_old_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    method = make_drifted(split_units=3)
    with torch.no_grad():
        method.network.hidden[0].weight[4, 0] += 0.5
    monkeypatch.setattr(method, "_train", lambda *args: None)
    consolidate(method, 1)
    upper = method.network.hidden[1].weight
    assert upper.shape == (11, 17)
    assert not upper[:8, 16].any()
    assert upper[:8, 4].all()
    assert upper[8:, 16].all()
    assert not upper[8:, 4].any()


def test_everything_but_other_heads_is_trained_after_a_split() -> None:
    method = make_drifted(split_units=3, split_epochs=3, l1=0.0)
    earlier = method.network.heads[0].weight.detach().clone()
    before: dict[str, Tensor] = {}
    train = method._train

    def train_noted(*args: Any) -> None:
        before.update(copy_weights(method))
        train(*args)

    method._train = train_noted  # type: ignore[method-assign]
    consolidate(method, 1)
    moved = {name: each != before[name] for name, each in copy_weights(method).items()}
    # Old units and copies, also units that were not selected for the task.
    assert moved["hidden.1.weight"][:8].any()
    assert moved["hidden.1.weight"][8:].any()
    assert moved["hidden.0.weight"].any()
    assert moved["heads.1.weight"].any()
    # It was given columns for the copies, which hold nothing.
    assert torch.equal(method.network.heads[0].weight[:, :8], earlier)
    assert not method.network.heads[0].weight[:, 8:].any()


def test_a_step_after_a_split_pulls_only_old_weights_back_to_those_of_the_previous_task() -> None:
    method = make_drifted(split_units=3, drift=0.7, l1=0.003, l2=0.1)
    anchor, batch = method._anchor["hidden.1.weight"].clone(), make_batch(1)
    checked = []

    def step_once(*args: Any) -> None:
        weight = method.network.hidden[1].weight
        with torch.no_grad():
            weight += 0.01
        start = weight.detach().clone()
        (gradient,) = torch.autograd.grad(F.cross_entropy(method.network(batch[0], 1), batch[1]), [weight])
        gradient += 0.1 * start
        gradient[:8, :16] += 0.7 * (start[:8, :16] - anchor)
        method.step(batch, 1, START, method.build_optimizer(torch.optim.SGD, 0.1))
        torch.testing.assert_close(weight.detach(), F.softshrink(start - 0.1 * gradient, 0.003))
        checked.append(weight.shape)

    method._train = step_once  # type: ignore[method-assign]
    consolidate(method, 1)
    assert checked == [(11, 16)]


def test_the_stronger_the_penalty_on_drift_the_less_old_units_move_after_a_split() -> None:
    distances = []
    for drift in (0.0, 0.5, 5.0):
        method = make_drifted(drift=drift, split_limit=0.35, split_epochs=20)
        anchor = method._anchor["hidden.1.weight"].clone()
        consolidate(method, 1)  # splits unit 3, so that units 1 and 6 stay where the task moved them
        assert method.count_units() == {"hidden.0": 16, "hidden.1": 9}
        distances.append(float((method.network.hidden[1].weight.detach()[:8] - anchor).norm()))
    assert distances[0] > distances[1] > 2 * distances[2]


@pytest.mark.parametrize("kind", NETWORKS)
def test_every_network_goes_through_all_phases(kind: str) -> None:
    method, shape = make_method(kind, loss_limit=0.0, split_limit=0.0, split_units=1, expand_units=2), get_shape(kind)
    for task in (0, 1):
        learn(method, task, shape)
        consolidate(method, task, shape)
    first, second = method.sizes.values()
    assert all(second[name] > size for name, size in first.items())
    assert second == method.count_units()
    assert method.compute_capacity() > 100
    assert get_logits(method, 1, shape).isfinite().all()
    # The first task uses only the units of its time.
    method._current = "2"
    before = [get_logits(method, task, shape) for task in (0, 1)]
    with torch.no_grad():
        for name, mask in mask_new_entries(method.network, method.axes, first).items():
            method.network.get_parameter(name)[mask] += 1
    assert torch.equal(get_logits(method, 0, shape), before[0])
    assert not torch.equal(get_logits(method, 1, shape), before[1])


def test_layers_that_no_pattern_fits_do_not_grow() -> None:
    method = make_after_first_task(
        loss_limit=0.0, expand_units={"hidden.1": 2}, split_units={"hidden.0": 1}, split_limit=0.0
    )
    learn(method, 1)
    consolidate(method, 1)
    assert method.count_units() == {"hidden.0": 17, "hidden.1": 10}


def test_weights_of_the_previous_task_are_stored_only_inside_a_task() -> None:
    method = make_after_first_task()
    assert method.count_bytes()["weights before the task"] == 0
    learn(method, 1)
    body = sum(each.nbytes for name, each in method.network.named_parameters() if not name.startswith("heads.1"))
    assert method.count_bytes()["weights before the task"] == body + 16 + 8
    consolidate(method, 1)
    assert method.count_bytes()["weights before the task"] == 0


def test_a_network_without_hidden_layers_raises_an_error_before_training() -> None:
    method = DEN(MLP((12,), (3, 2)), DENSettings(), exclude=["heads.*"])
    with pytest.raises(ValueError, match="den has nothing to grow in MLP"):
        learn(method, 0)


@pytest.mark.parametrize("setting", ["expand_units", "split_units"])
def test_a_pattern_that_fits_no_layer_raises_an_error_before_training(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"{setting}: the pattern 'conv\*' matches no module"):
        make_method(**{setting: {"conv*": 2}})
