"""RCL: old outputs stay equal to the bit, the best trial is used, and the controller learns from rewards."""

from typing import Any

import pytest
import torch
from methods.growth import (
    HEADS,
    NETWORKS,
    consolidate,
    get_excluded,
    get_logits,
    get_shape,
    learn,
    make_batch,
    make_network,
)

from sgp.methods import Moment
from sgp.methods.rcl import RCL, Controller, RCLSettings
from sgp.networks import MLP


def make_method(kind: str = "mlp", **settings: Any) -> RCL:
    given: dict[str, Any] = {"trials": 2, "trial_epochs": 1, "most_units": 4}
    return RCL(make_network(kind), RCLSettings(**(given | settings)), exclude=get_excluded(kind))


@pytest.mark.parametrize("kind", NETWORKS)
def test_old_outputs_do_not_change_by_one_bit(kind: str) -> None:
    method, shape = make_method(kind), get_shape(kind)
    before = []
    for task in range(len(HEADS)):
        learn(method, task, shape)
        assert all(torch.equal(get_logits(method, old, shape), then) for old, then in enumerate(before))
        consolidate(method, task, shape)
        before.append(get_logits(method, task, shape))
    assert method.count_units() != method.sizes["0"]
    assert all(torch.equal(get_logits(method, old, shape), then) for old, then in enumerate(before))


def test_a_task_moves_only_its_new_parts_and_its_head() -> None:
    method = make_method(trials=1, most_units=9)
    learn(method, 0)
    consolidate(method, 0)
    before = {name: each.detach().clone() for name, each in method.network.named_parameters()}
    learn(method, 1)
    now = dict(method.network.named_parameters())
    assert method.count_units()["hidden.0"] > 16
    assert method.count_units()["hidden.1"] > 8
    assert torch.equal(now["hidden.0.weight"][:16], before["hidden.0.weight"])
    assert torch.equal(now["hidden.0.bias"][:16], before["hidden.0.bias"])
    assert torch.equal(now["hidden.1.weight"][:8, :16], before["hidden.1.weight"])
    assert torch.equal(now["heads.0.weight"][:, :8], before["heads.0.weight"])
    assert not torch.equal(now["heads.1.weight"][:, :8], before["heads.1.weight"])


@pytest.mark.parametrize("deep_units", ["learned", "as-drawn"])
def test_published_weights_into_deep_units_stay_as_they_were_drawn(deep_units: Any) -> None:
    method = make_method(trials=1, most_units=9, deep_units=deep_units)
    learn(method, 0)
    consolidate(method, 0)
    learn(method, 1, steps=0)
    drawn = {name: each.detach().clone() for name, each in method.network.named_parameters()}
    assert method.count_units()["hidden.0"] > 16
    assert method.count_units()["hidden.1"] > 8
    optimizer = method.build_optimizer(torch.optim.SGD, 0.1)
    for _ in range(3):
        method.step(make_batch(1), 1, Moment(0, 0.0, 0.0), optimizer)
    now = dict(method.network.named_parameters())
    assert not torch.equal(now["hidden.0.weight"][16:], drawn["hidden.0.weight"][16:])
    assert not torch.equal(now["hidden.1.weight"][:8, 16:], drawn["hidden.1.weight"][:8, 16:])
    assert torch.equal(now["hidden.1.weight"][8:], drawn["hidden.1.weight"][8:]) == (deep_units == "as-drawn")


def test_the_trial_with_the_best_reward_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    method = make_method(trials=5, size_penalty=0.0)
    learn(method, 0)
    consolidate(method, 0)
    accuracies, tried = iter([0.2, 0.4, 0.9, 0.9, 0.1]), []

    def accuracy(*args: object) -> float:
        tried.append((method.count_units(), {k: v.clone() for k, v in method.network.state_dict().items()}))
        return next(accuracies)

    monkeypatch.setattr(method, "_compute_accuracy", accuracy)
    learn(method, 1, steps=0)
    assert len({tuple(sizes.values()) for sizes, _ in tried}) > 2
    sizes, weights = tried[2]  # the first of the best
    assert method.count_units() == sizes
    assert all(torch.equal(tensor, weights[name]) for name, tensor in method.network.state_dict().items())
    # Each began where the task before had ended.
    for _, weights in tried:
        assert torch.equal(weights["hidden.1.weight"][:8, :16], tried[0][1]["hidden.1.weight"][:8, :16])


def test_units_cost_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    method = make_method(trials=12, size_penalty=0.01)
    learn(method, 0)
    consolidate(method, 0)
    tried = []

    def accuracy(*args: object) -> float:
        tried.append(sum(method.count_units().values()))
        return 0.5

    monkeypatch.setattr(method, "_compute_accuracy", accuracy)
    learn(method, 1, steps=0)
    assert sum(method.count_units().values()) == min(tried) < max(tried)


def test_trials_are_evaluated_on_held_out_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    method = make_method(trials=1, judged=0.25)
    learn(method, 0)
    consolidate(method, 0)
    used = {}
    monkeypatch.setattr(method, "_train", lambda examples, *rest: used.update(trained=examples))
    monkeypatch.setattr(method, "_compute_accuracy", lambda examples, size: used.update(judged=examples) or 0.5)
    learn(method, 1, steps=0)
    assert (len(used["trained"][1]), len(used["judged"][1])) == (9, 3)
    together = torch.cat([used["judged"][0], used["trained"][0]])
    assert len(together.unique(dim=0)) == 12


def test_a_controller_learns_to_choose_rewarded_numbers() -> None:
    torch.manual_seed(0)
    controller = Controller([3, 3], RCLSettings(controller_units=20, controller_lr=0.02, value_lr=0.02))
    wanted = torch.tensor([0, 2])
    for _ in range(200):
        choices = controller()
        drawn = choices.sample()
        controller.learn(choices, drawn, (drawn == wanted).float().mean().item())
    probabilities = controller().probs
    assert probabilities[0, 0] > 0.8
    assert probabilities[1, 2] > 0.8
    assert controller.value(controller.state).item() == pytest.approx(1, abs=0.3)


def test_a_controller_never_chooses_more_than_a_layer_may_get() -> None:
    torch.manual_seed(0)
    controller = Controller([0, 5, 2], RCLSettings())
    drawn = torch.stack([controller().sample() for _ in range(100)])
    assert drawn.amax(dim=0).tolist() == [0, 5, 2]


def test_the_most_units_may_be_given_by_layer() -> None:
    method = make_method(trials=4, most_units={"hidden.1": 3})
    learn(method, 0)
    consolidate(method, 0)
    learn(method, 1)
    assert method.count_units()["hidden.0"] == 16
    assert 8 <= method.count_units()["hidden.1"] <= 11


def test_capacity_counts_body_and_heads_with_the_units_of_their_time() -> None:
    method = make_method(trials=1)
    base = sum(each.numel() for each in method.network.parameters())
    assert method.compute_capacity() == 100
    learn(method, 0)
    consolidate(method, 0)
    assert method.compute_capacity() == 100
    learn(method, 1)
    consolidate(method, 1)
    one, two = method.count_units().values()
    body = one * 12 + one + two * one + two
    heads = (3 * 8 + 3) + (2 * two + 2) + (4 * 8 + 4)  # of its time, of now, as built
    assert method.compute_capacity() == pytest.approx(100 * (body + heads) / base)


def test_tasks_that_share_a_head_have_a_copy_each_and_it_counts() -> None:
    method = make_method("shared", trials=1)
    base = sum(each.numel() for each in method.network.parameters())
    for task in (0, 1):
        learn(method, task)
        consolidate(method, task)
    one, two = method.count_units().values()
    body = one * 12 + one + two * one + two
    assert method.compute_capacity() == pytest.approx(100 * (body + (4 * 8 + 4) + (4 * two + 4)) / base)
    assert method.count_bytes() == {"of each task": 4 * ((4 * 8 + 4) + (4 * two + 4))}


def test_a_network_without_hidden_layers_raises_an_error_before_training() -> None:
    method = RCL(MLP((12,), (3, 2)), RCLSettings(), exclude=["heads.*"])
    with pytest.raises(ValueError, match="rcl has nothing to grow in MLP: it has no hidden layer"):
        learn(method, 0)


def test_a_pattern_that_fits_no_layer_raises_an_error_before_training() -> None:
    with pytest.raises(ValueError, match=r"most_units: the pattern 'cov\*' matches no module"):
        make_method(most_units={"cov*": 2})
