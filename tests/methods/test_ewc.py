"""EWC: its penalty is the stated quadratic, added once per step, and protects old tasks."""

import copy
import dataclasses
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from methods.penalty import compute_penalty
from torch import Tensor, nn
from torch.nn import functional as F

from sgp.methods import METHODS, Batch
from sgp.methods.ewc import EWC, EWCSettings
from sgp.methods.fisher import compute_sample_fisher
from sgp.networks import MLP

WIDTHS = (6, 8)


def make_network() -> MLP:
    torch.manual_seed(0)
    return MLP(WIDTHS, (3, 2))


def make_batch(task: int, count: int = 20) -> Batch:
    generator = torch.Generator().manual_seed(task)
    classes = (3, 2)[task]
    return torch.randn(count, WIDTHS[0], generator=generator), torch.randint(classes, (count,), generator=generator)


def make_method(**settings: Any) -> EWC:
    return EWC(make_network(), EWCSettings(**({"strength": 3.0} | settings)), exclude=["heads.*"])


def consolidate(method: EWC, task: int) -> None:
    def log_likelihood(batch: Batch) -> Tensor:
        return -F.cross_entropy(method.network(batch[0], task), batch[1], reduction="none")

    method.consolidate([make_batch(task)], log_likelihood)


def compute_loss(method: EWC, task: int) -> Tensor:
    inputs, labels = make_batch(task)
    return F.cross_entropy(method.network(inputs, task), labels)


def move_weights(method: EWC, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in method.network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)


def learn_one_task(**settings: Any) -> EWC:
    """Return a method that has learned one task and whose weights have moved since."""
    method = make_method(**settings)
    consolidate(method, 0)
    move_weights(method, 1)
    return method


def get_gradients(method: EWC) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in method.network.named_parameters()
        if parameter.grad is not None
    }


def compute_with_penalty(method: EWC, task: int) -> dict[str, Tensor]:
    """Compute the gradient of the loss and the penalty by autograd."""
    names, weights = zip(*method.network.named_parameters(), strict=True)
    found = torch.autograd.grad(compute_loss(method, task) + compute_penalty(method), weights, allow_unused=True)
    return {name: value for name, value in zip(names, found, strict=True) if value is not None}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], msg=name)


def make_sgd(method: EWC, lr: float = 0.1) -> torch.optim.SGD:
    optimizer = torch.optim.SGD(method.network.parameters(), lr=lr)
    method.attach(optimizer)
    return optimizer


def test_the_penalty_is_the_quadratic_of_fisher_and_anchor() -> None:
    method = make_method()
    consolidate(method, 0)
    anchor = {name: parameter.detach().clone() for name, parameter in method.get_penalized().items()}
    assert set(anchor) == {"hidden.0.weight", "hidden.0.bias"}
    assert compute_penalty(method) == 0

    def log_likelihood(batch: Batch) -> Tensor:
        return -F.cross_entropy(method.network(batch[0], 0), batch[1], reduction="none")

    fisher = compute_sample_fisher(method.network, method.get_penalized(), [make_batch(0)], log_likelihood)
    move_weights(method, 1)
    expected = sum(
        float((fisher[name] * (parameter.detach() - anchor[name]).square()).sum())
        for name, parameter in method.get_penalized().items()
    )
    assert float(compute_penalty(method).detach()) == pytest.approx(3.0 / 2 * expected, rel=1e-5)


def test_what_is_added_to_the_gradient_is_autograds_gradient_of_the_penalty() -> None:
    method = learn_one_task()
    make_sgd(method)
    expected = compute_with_penalty(method, 1)
    compute_loss(method, 1).backward()
    assert_same(get_gradients(method), expected)


def test_nothing_is_added_before_the_first_task_is_consolidated() -> None:
    method = make_method()
    make_sgd(method)
    compute_loss(method, 0).backward()
    parameters = [*method.get_penalized().values()]
    plain = dict(zip(get_gradients(method), torch.autograd.grad(compute_loss(method, 0), parameters), strict=False))
    for name, value in plain.items():
        assert torch.equal(get_gradients(method)[name], value)


@pytest.mark.parametrize("to_none", [True, False])
def test_the_penalty_is_added_once_per_step_when_gradients_are_accumulated(to_none: bool) -> None:
    method = learn_one_task()
    optimizer = make_sgd(method)
    for _ in range(2):
        expected = compute_with_penalty(method, 1)
        optimizer.zero_grad(set_to_none=to_none)
        for _ in range(4):
            (compute_loss(method, 1) / 4).backward()
        assert_same({k: v for k, v in get_gradients(method).items() if k in expected}, expected)
        optimizer.step()


@pytest.mark.parametrize("to_none", [True, False])
def test_discarded_gradients_do_not_discard_the_next_penalty(to_none: bool) -> None:
    method = learn_one_task()
    optimizer = make_sgd(method)
    compute_loss(method, 1).backward()
    optimizer.zero_grad(set_to_none=to_none)
    expected = compute_with_penalty(method, 1)
    compute_loss(method, 1).backward()
    assert_same({k: v for k, v in get_gradients(method).items() if k in expected}, expected)


def test_a_closure_has_the_penalty_each_time_it_runs() -> None:
    method, other = learn_one_task(), learn_one_task()
    for each, is_attached in ((method, True), (other, False)):
        optimizer = torch.optim.LBFGS(each.get_penalized().values(), lr=0.5, max_iter=5)
        if is_attached:
            each.attach(optimizer)

        def closure(each: EWC = each, is_attached: bool = is_attached) -> float:
            each.network.zero_grad()
            value = compute_loss(each, 1) + compute_penalty(each)
            (compute_loss(each, 1) if is_attached else value).backward()
            return value.item()

        optimizer.step(closure)
    for name, weight in other.get_penalized().items():
        torch.testing.assert_close(method.get_penalized()[name], weight, rtol=1e-3, atol=1e-4)


def test_autograd_grad_gives_the_raw_gradient() -> None:
    method = learn_one_task()
    weights = list(method.get_penalized().values())
    before = torch.autograd.grad(compute_loss(method, 1), weights)
    make_sgd(method)
    for one, other in zip(before, torch.autograd.grad(compute_loss(method, 1), weights), strict=True):
        assert torch.equal(one, other)


def test_attaching_again_does_not_add_the_penalty_twice() -> None:
    method = learn_one_task()
    for _ in range(3):
        make_sgd(method)
    expected = compute_with_penalty(method, 1)
    compute_loss(method, 1).backward()
    assert_same(get_gradients(method), expected)


def test_clipping_sees_the_penalty() -> None:
    method = learn_one_task(strength=1e6)
    make_sgd(method)
    compute_loss(method, 1).backward()
    before = nn.utils.clip_grad_norm_(method.network.parameters(), 1.0)
    assert before > 100
    assert nn.utils.get_total_norm([p.grad for p in method.get_penalized().values() if p.grad is not None]) <= 1.001


def test_copies_files_and_deleted_methods_leave_raw_gradients() -> None:
    method = learn_one_task()
    make_sgd(method)
    model = method.network
    raw = torch.autograd.grad(compute_loss(method, 1), [*method.get_penalized().values()])
    for other in (copy.deepcopy(model), torch.load(save_to_memory(model), weights_only=False)):
        F.cross_entropy(other(make_batch(1)[0], 1), make_batch(1)[1]).backward()
        assert torch.equal(other.hidden[0].weight.grad, raw[0])
    del method
    F.cross_entropy(model(make_batch(1)[0], 1), make_batch(1)[1]).backward()
    assert torch.equal(model.get_parameter("hidden.0.weight").grad, raw[0])  # type: ignore[arg-type]


def save_to_memory(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_an_implicit_step_has_the_penaltys_gradient_at_its_end() -> None:
    method = learn_one_task(strength=50.0)
    optimizer = make_sgd(method, lr=0.2)
    names = list(method.get_penalized())
    raw = dict(
        zip(names, torch.autograd.grad(compute_loss(method, 1), [*method.get_penalized().values()]), strict=True)
    )
    before = {name: weight.detach().clone() for name, weight in method.get_penalized().items()}
    compute_loss(method, 1).backward()
    optimizer.step()
    for name, weight in method.get_penalized().items():
        at_end = 50.0 * method.importance[name] * (weight - method.anchor[name])
        torch.testing.assert_close(weight.detach(), (before[name] - 0.2 * (raw[name] + at_end)).detach())


def test_an_explicit_step_has_the_penaltys_gradient_at_its_start() -> None:
    method = learn_one_task(penalty_step="explicit")
    optimizer = make_sgd(method)
    expected = compute_with_penalty(method, 1)
    before = {name: weight.detach().clone() for name, weight in method.get_penalized().items()}
    compute_loss(method, 1).backward()
    optimizer.step()
    for name, weight in method.get_penalized().items():
        torch.testing.assert_close(weight.detach(), before[name] - 0.1 * expected[name])


def test_implicit_steps_are_stable_at_any_strength_and_end_where_small_explicit_ones_do() -> None:
    ends = {}
    for step, lr, count in (("implicit", 0.3, 60), ("explicit", 0.005, 1200)):
        method = learn_one_task(strength=500.0, penalty_step=step)
        optimizer = make_sgd(method, lr=lr)
        for _ in range(count):
            optimizer.zero_grad()
            # A convex loss, so that there is one end.
            sum((weight - 1).square().sum() for weight in method.get_penalized().values()).backward()  # type: ignore[union-attr]
            optimizer.step()
        ends[step] = torch.cat([weight.detach().flatten() for weight in method.get_penalized().values()])
    torch.testing.assert_close(ends["implicit"], ends["explicit"], rtol=1e-3, atol=1e-3)
    method = learn_one_task(strength=1e8)
    optimizer = make_sgd(method, lr=10.0)
    for _ in range(20):
        optimizer.zero_grad()
        compute_loss(method, 1).backward()
        optimizer.step()
    assert all(torch.isfinite(weight).all() for weight in method.get_penalized().values())


def test_separate_tasks_pull_like_the_sum_of_their_penalties() -> None:
    method = make_method(merge="separate")
    fishers, anchors = [], []
    for task in (0, 1, 0):
        alone = make_method()
        alone.network.load_state_dict(method.network.state_dict())
        consolidate(alone, task)
        fishers.append(alone.importance)
        anchors.append(alone.anchor)
        consolidate(method, task)
        move_weights(method, task + 5)
    for name, weight in method.get_penalized().items():
        expected = sum(
            3.0 * fisher[name] * (weight - anchor[name]) for fisher, anchor in zip(fishers, anchors, strict=True)
        )
        pull = method.compute_pull(name, weight)
        assert pull is not None
        torch.testing.assert_close(pull, torch.as_tensor(expected).detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("merge", "decay"), [("online", 1.0), ("online", 0.5), ("mean", 1.0)])
def test_merged_tasks_have_the_last_anchor_and_a_sum_or_mean_of_fishers(merge: str, decay: float) -> None:
    method, total = make_method(merge=merge, decay=decay), torch.zeros(WIDTHS[1], WIDTHS[0])
    for number, task in enumerate((0, 1, 0)):
        alone = make_method()
        alone.network.load_state_dict(method.network.state_dict())
        consolidate(alone, task)
        new = alone.importance["hidden.0.weight"]
        total = decay * total + new if merge == "online" else (new + number * total) / (number + 1)
        consolidate(method, task)
        torch.testing.assert_close(method.importance["hidden.0.weight"], total)
        assert torch.equal(method.anchor["hidden.0.weight"], method.network.get_parameter("hidden.0.weight"))
        move_weights(method, task + 5)


def test_a_stronger_penalty_protects_old_tasks_more() -> None:
    changes = []
    for strength in (0.0, 10.0, 1000.0):
        method = make_method(strength=strength)
        optimizer = make_sgd(method)
        for task in (0, 1):
            start = method.network(make_batch(0)[0], 0).detach()
            for _ in range(60):
                optimizer.zero_grad()
                compute_loss(method, task).backward()
                optimizer.step()
            consolidate(method, task)
        changes.append(float((method.network(make_batch(0)[0], 0).detach() - start).norm()))
    assert changes[0] > 1.5 * changes[1] > 1.5 * 1.5 * changes[2]


def test_a_task_with_one_class_protects_nothing() -> None:
    method = EWC(MLP(WIDTHS, (1, 3)), EWCSettings(), exclude=["heads.*"])
    inputs = torch.randn(8, WIDTHS[0])
    labels = torch.zeros(8, dtype=torch.long)
    for task in (0, 0):
        method.consolidate(
            [(inputs, labels)], lambda b, t=task: -F.cross_entropy(method.network(b[0], t), b[1], reduction="none")
        )
    assert not any(value.any() for value in method.importance.values())
    assert all(torch.equal(method.anchor[name], weight) for name, weight in method.get_penalized().items())


def test_bytes_are_those_of_the_state() -> None:
    method = make_method()
    assert method.count_bytes() == {"fisher": 0, "anchors": 0}
    for task in (0, 1):
        consolidate(method, task)
        state = method.state_dict()
        stored = [tensor.nbytes for part in ("importance", "anchor") for tensor in state[part].values()]
        assert sum(method.count_bytes().values()) == sum(stored) == 2 * 4 * (6 * 8 + 8)


def test_a_state_of_another_network_raises_an_error() -> None:
    method = learn_one_task()
    other = EWC(MLP((6, 9), (3, 2)), EWCSettings(), exclude=["heads.*"])
    with pytest.raises(ValueError, match=r"another network: 'hidden.0.weight' \(8, 6\)"):
        other.load_state_dict(method.state_dict())


def test_one_task_alone_is_finetuning(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="the settings come from YAML files; of the extra 'benchmarks'")
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra 'benchmarks'")
    from experiments.small import run, same_weights, small

    one, other = (run(tmp_path / name, small(name, tasks=1, epochs=1)) for name in ("ewc", "finetune"))
    assert same_weights(one.network, other.network)


def test_presets_are_the_protocols() -> None:
    pytest.importorskip("yaml", reason="the settings come from YAML files; of the extra 'benchmarks'")
    from sgp.experiments.config import configure

    assert METHODS["ewc"] is EWC
    values = {"split-cifar100": (0.05, 5000), "cifar100-superclass": (0.03, 1000), "split-miniimagenet": (0.03, 5000)}
    for benchmark, (lr, strength) in values.items():
        paper, reference = (configure(benchmark, "ewc", preset).flat() for preset in ("paper", "reference"))
        for flat in (paper, reference):
            assert (flat["lr"], flat["strength"]) == (lr, strength)
            assert tuple(flat[name] for name in PUBLISHED) == tuple(PUBLISHED.values())
        assert (reference["lr_min"], reference["lr_factor"], reference["patience"]) == (1e-4, 3, 5)
        corrected = configure(benchmark, "ewc", "corrected").flat()
        exact = dataclasses.asdict(EWCSettings(strength=strength / 20, fisher_labels="drawn"))
        assert {name: corrected[name] for name in exact} == exact


# On every benchmark of the paper's tables, in the presets `paper` and `reference`.
PUBLISHED = {
    "fisher": "batch",
    "fisher_batch": 20,
    "fisher_labels": "true",
    "fisher_mode": "train",
    "merge": "mean",
    "penalty_step": "explicit",
    "clip_norm": 100.0,
}


@pytest.mark.parametrize(("clip_norm", "is_finite"), [(100.0, True), (math.inf, False)])
def test_clipping_keeps_steps_finite_where_the_published_penalty_diverges(clip_norm: float, is_finite: bool) -> None:
    settings = PUBLISHED | {"clip_norm": clip_norm, "strength": 5000.0}
    method = make_method(**settings)
    optimizer = make_sgd(method, lr=0.05)
    consolidate(method, 0)
    # What makes plain steps diverge, whatever the loss is.
    assert 0.05 * 5000 * max(float(fisher.max()) for fisher in method.importance.values()) > 2
    for _ in range(300):
        optimizer.zero_grad()
        compute_loss(method, 1).backward()
        optimizer.step()
    assert all(torch.isfinite(weight).all() for weight in method.network.parameters()) == is_finite
    assert bool(torch.isfinite(compute_loss(method, 1))) == is_finite


@pytest.mark.parametrize("step", ["implicit", "explicit"])
def test_the_gradient_that_the_optimizer_uses_is_clipped_as_a_whole(step: str) -> None:
    changes = {}
    for clip_norm in (math.inf, 0.1):
        method = learn_one_task(strength=50.0, penalty_step=step, clip_norm=clip_norm)
        before = [weight.detach().clone() for weight in method.network.parameters()]
        optimizer = make_sgd(method, lr=0.2)
        # Two passes of half the loss each: their sum is clipped.
        for _ in range(2):
            (compute_loss(method, 1) / 2).backward()
        optimizer.step()
        moved = [now.detach() - then for now, then in zip(method.network.parameters(), before, strict=True)]
        changes[clip_norm] = torch.cat([change.flatten() for change in moved])
    plain, clipped = changes[math.inf], changes[0.1]
    assert float(plain.norm()) > 0.2 * 0.1
    torch.testing.assert_close(clipped, plain * (0.2 * 0.1 / plain.norm()), rtol=1e-4, atol=1e-7)


def test_a_gradient_within_the_norm_is_not_clipped() -> None:
    ends = []
    for clip_norm in (math.inf, 1e6):
        method = learn_one_task(clip_norm=clip_norm)
        optimizer = make_sgd(method)
        compute_loss(method, 1).backward()
        optimizer.step()
        ends.append([weight.detach().clone() for weight in method.network.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_attaching_to_the_next_tasks_optimizer_leaves_the_last_one_unclipped() -> None:
    method = learn_one_task(clip_norm=1e-6)
    earlier = make_sgd(method)
    make_sgd(method)
    before = method.network.get_parameter("hidden.0.weight").detach().clone()
    compute_loss(method, 1).backward()
    earlier.step()
    assert float((method.network.get_parameter("hidden.0.weight").detach() - before).norm()) > 1e-3
