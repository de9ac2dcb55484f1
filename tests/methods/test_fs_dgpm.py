"""FS-DGPM: steps uphill inside old directions, soft weights that follow their gradient, bases from stored examples."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgp.methods import METHODS, Batch, Moment
from sgp.methods.fs_dgpm import FSDGPM, FSDGPMSettings
from sgp.networks import MLP
from sgp.projection import Subspace

WIDTHS = (12, 16, 8)
FIRST, LATER = Moment(0, 0.0, 0.0), Moment(1, 0.0, 0.5)


def make_mlp() -> MLP:
    torch.manual_seed(0)
    return MLP(WIDTHS, (3, 3, 2))


def make_method(network: nn.Module | None = None, **settings: Any) -> FSDGPM:
    return FSDGPM(network or make_mlp(), FSDGPMSettings(**({"memory_size": 50} | settings)), exclude=["heads.*"])


def make_batches(task: int) -> list[Batch]:
    """Return batches whose inputs lie in a few directions of the task's own."""
    generator = torch.Generator().manual_seed(task)
    inputs = torch.randn(40, 3, generator=generator) @ torch.randn(3, WIDTHS[0], generator=generator)
    labels = torch.randint(2, (40,), generator=generator)
    return list(zip(inputs.split(20), labels.split(20), strict=True))


def train(method: FSDGPM, task: int, *, epochs: int = 2, lr: float = 0.05) -> torch.optim.Optimizer:
    """Train as the trainer does, without consolidation."""
    method.begin_task(task, make_batches(task))
    optimizer = method.build_optimizer(torch.optim.SGD, lr)
    method.attach(optimizer)
    for epoch in range(epochs):
        for batch in make_batches(task):
            method.step(batch, task, LATER if epoch else FIRST, optimizer)
    return optimizer


def consolidate(method: FSDGPM, task: int) -> None:
    method.consolidate(make_batches(task), lambda batch: method.network(batch[0], task)[:, 0])


def learn_tasks(tasks: int, **settings: Any) -> FSDGPM:
    torch.manual_seed(1)
    method = make_method(**settings)
    for task in range(tasks):
        train(method, task)
        consolidate(method, task)
    return method


def copy_layers(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of each protected layer's weight with its bias as one more column."""
    return {
        name: torch.cat([layer.weight.detach(), layer.bias.detach().unsqueeze(1)], dim=1)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.startswith("hidden")
    }


def compute_uphill(method: FSDGPM, task: int = 1) -> dict[str, Tensor]:
    """Compute the direction of a batch's first step uphill."""
    spaces = method._weigh_bases({name: torch.ones_like(s.importance) for name, s in method.memory.subspaces.items()})
    return method._compute_uphill(make_batches(task)[0], task, dict(method.network.named_parameters()), spaces)


def test_steps_uphill_stay_inside_the_span_of_the_bases() -> None:
    method = learn_tasks(1)
    found = compute_uphill(method)
    for layer, space in method.memory.subspaces.items():
        step = torch.cat([found[f"{layer}.weight"], found[f"{layer}.bias"].unsqueeze(1)], dim=1)
        M = space.basis[0]
        assert float(step.norm()) > 1e-3
        assert torch.allclose(step @ M @ M.T, step, atol=1e-6)
        assert M.shape[1] < M.shape[0]


def test_steps_uphill_are_the_gradient_weighted_by_soft_weights() -> None:
    method = learn_tasks(1)
    inputs, labels = make_batches(1)[0]
    weight = method.network.get_parameter("hidden.0.weight")
    bias = method.network.get_parameter("hidden.0.bias")
    g, g_bias = torch.autograd.grad(F.cross_entropy(method.network(inputs, 1), labels), [weight, bias])
    old = method.memory.subspaces["hidden.0"]
    soft = torch.rand_like(old.importance)
    spaces = {"hidden.0": Subspace(old.basis, soft, old.rank)}
    found = method._compute_uphill((inputs, labels), 1, dict(method.network.named_parameters()), spaces)
    M = old.basis[0]
    expected = torch.cat([g, g_bias.unsqueeze(1)], dim=1) @ M @ torch.diag(soft[0]) @ M.T
    assert torch.allclose(found["hidden.0.weight"], expected[:, :-1], atol=1e-6)
    assert torch.allclose(found["hidden.0.bias"], expected[:, -1], atol=1e-6)


def test_before_there_are_bases_and_for_heads_steps_uphill_are_the_gradient_itself() -> None:
    for method in (make_method(), learn_tasks(1)):
        inputs, labels = make_batches(1)[0]
        names = [f"heads.1.{leaf}" for leaf in ("weight", "bias")]
        if not method.memory.tasks:
            names += [f"hidden.0.{leaf}" for leaf in ("weight", "bias")]
        loss = F.cross_entropy(method.network(inputs, 1), labels)
        expected = torch.autograd.grad(loss, [method.network.get_parameter(name) for name in names])
        found = compute_uphill(method)
        for name, gradient in zip(names, expected, strict=True):
            assert torch.equal(found[name], gradient), name
        assert "heads.0.weight" not in found  # the loss does not depend on it


def test_the_loss_is_that_of_batch_and_replay_after_each_step_uphill() -> None:
    method = learn_tasks(1, sharpness_lr=0.1, memory_batch=10)
    batch = make_batches(1)[0]
    spaces = method._weigh_bases({n: torch.ones_like(s.importance) for n, s in method.memory.subspaces.items()})
    torch.manual_seed(5)
    found = method._differentiate(batch, 1, spaces, 0.1)
    torch.manual_seed(5)
    drawn = method.buffer.draw(10)
    twin, expected = make_mlp(), []
    twin.load_state_dict(method.network.state_dict())
    for inputs, labels in zip(batch[0].split(10), batch[1].split(10), strict=True):
        twin.zero_grad()
        F.cross_entropy(twin(inputs, 1), labels).backward()
        with torch.no_grad():
            for layer, space in method.memory.subspaces.items():
                module = twin.get_submodule(layer)
                assert isinstance(module, nn.Linear)
                assert module.weight.grad is not None
                assert module.bias.grad is not None
                M = space.basis[0]
                g = torch.cat([module.weight.grad, module.bias.grad.unsqueeze(1)], dim=1) @ M @ M.T
                module.weight += 0.1 * g[:, :-1]
                module.bias += 0.1 * g[:, -1]
            for parameter in twin.heads[1].parameters():
                assert parameter.grad is not None
                parameter += 0.1 * parameter.grad
            new = F.cross_entropy(twin(batch[0], 1), batch[1], reduction="sum")
            old = F.cross_entropy(twin(drawn["inputs"], 0), drawn["labels"], reduction="sum")
            expected.append((new + old) / 30)
    assert found == pytest.approx(float(sum(expected)) / 2, rel=1e-5)


def take_soft_step(method: FSDGPM, pull: float) -> dict[str, Tensor]:
    """Take one step of the soft weights with the same gradient for all."""
    method._update_soft({name: torch.full_like(value, pull) for name, value in method._soft.items()}, 0.01)
    return method.compute_soft_weights()


@pytest.mark.parametrize("rule", ["repeated", "once"])
def test_soft_weights_receive_a_gradient_and_follow_it(rule: str) -> None:
    method = learn_tasks(1, soft_weights=rule)
    method.begin_task(1, make_batches(1))
    soft = {name: value.clone().requires_grad_() for name, value in method._soft.items()}
    method._differentiate(make_batches(1)[0], 1, method._weigh_bases(soft), 0.1)
    for name, value in soft.items():
        assert value.grad is not None, name
        assert float(value.grad.abs().max()) > 0, name
    before = method.compute_soft_weights()
    for _ in range(3):
        after = take_soft_step(method, 50.0)
    for name, value in after.items():
        assert (value < before[name] - 0.005).all(), name
        # What is projected follows at once.
        assert torch.equal(method.memory.subspaces[name].importance, value)


def test_the_gradient_of_soft_weights_is_right() -> None:
    method = learn_tasks(1, soft_weights="once")
    method.network.double()
    method.begin_task(1, make_batches(1))
    inputs, labels = make_batches(1)[0]
    method.buffer.contents = {}

    def loss(name: str, value: Tensor) -> float:
        soft = {n: v.double() for n, v in method._soft.items()} | {name: value}
        spaces = {
            n: Subspace(old.basis.double(), method._compute_lambda(soft[n]), old.rank)
            for n, old in method.memory.subspaces.items()
        }
        return method._differentiate((inputs.double(), labels), 1, spaces, 0.1)

    # With one step uphill the first order is exact: that step's gradient does not depend on soft weights.
    object.__setattr__(method.settings, "inner_steps", 1)
    value = torch.full_like(method._soft["hidden.0"], 0.1).double().requires_grad_()
    loss("hidden.0", value)
    assert value.grad is not None
    gradient = value.grad.clone()
    for column in range(value.shape[1]):
        shift = torch.zeros_like(value)
        shift[0, column] = 1e-5
        up, down = (loss("hidden.0", value.detach() + sign * shift) for sign in (1, -1))
        assert (up - down) / 2e-5 == pytest.approx(float(gradient[0, column]), rel=1e-4, abs=1e-9)


def test_the_rules_of_soft_weights_are_those_of_the_setting() -> None:
    grown = {rule: learn_tasks(1, soft_weights=rule) for rule in ("repeated", "once", "orphaned")}
    for method in grown.values():
        method.begin_task(1, make_batches(1))
    sigmoid = lambda x: 1 / (1 + math.exp(-10 * x))  # noqa: E731
    for rule, expected in (
        ("repeated", [sigmoid(1 - 0.5), sigmoid(sigmoid(1 - 0.5) - 0.5)]),
        ("once", [sigmoid(1 - 0.5), sigmoid(1 - 1.0)]),
        ("orphaned", [sigmoid(1), sigmoid(sigmoid(1))]),
    ):
        for value in expected:
            found = take_soft_step(grown[rule], 50.0)
            for weights in found.values():
                assert weights.flatten().tolist() == pytest.approx([value] * weights.numel(), rel=1e-5), rule


def test_in_reference_no_pull_moves_soft_weights() -> None:
    method = learn_tasks(1, soft_weights="orphaned")
    method.begin_task(1, make_batches(1))
    for _ in range(20):
        found = take_soft_step(method, 1000.0)
    assert all((value > 0.9999).all() for value in found.values())


def test_soft_weights_start_at_one_in_each_task() -> None:
    method = learn_tasks(1)
    assert method.compute_soft_weights() == {}
    method.begin_task(1, make_batches(1))
    take_soft_step(method, 80.0)
    consolidate(method, 1)
    method.begin_task(2, make_batches(2))
    for name, value in method.compute_soft_weights().items():
        assert (value == 1).all()
        assert (method.memory.subspaces[name].importance == 1).all()


@pytest.mark.parametrize("soft", [1.0, 0.3])
def test_weights_move_along_bases_as_much_as_soft_weights_allow(soft: float) -> None:
    method = learn_tasks(1, soft_weights="once", soft_lr=0.0, sharpness_lr=0.0)
    free = learn_tasks(1, soft_weights="once", soft_lr=0.0, sharpness_lr=0.0)
    for each, value in ((method, soft), (free, 0.0)):
        each.begin_task(1, make_batches(1))
        each._soft = {
            name: torch.full_like(u, math.log(value / (1 - value)) / 10 if 0 < value < 1 else 100 * (value - 0.5))
            for name, u in each._soft.items()
        }
        each.memory.set_importances(each.compute_soft_weights())
    changes = []
    for each in (method, free):
        before = copy_layers(each.network)
        optimizer = torch.optim.SGD(each.trained_module.parameters(), lr=0.1)
        each.attach(optimizer)
        torch.manual_seed(3)
        each.step(make_batches(1)[0], 1, LATER, optimizer)
        changes.append({name: weight - before[name] for name, weight in copy_layers(each.network).items()})
    for layer, space in method.memory.subspaces.items():
        M = space.basis[0]
        assert torch.allclose(changes[0][layer] @ M, (1 - soft) * changes[1][layer] @ M, atol=1e-5)
        rest = torch.eye(M.shape[0]) - M @ M.T
        assert torch.allclose(changes[0][layer] @ rest, changes[1][layer] @ rest, atol=1e-5)
        assert float((changes[1][layer] @ M).norm()) > 1e-3


def compute_step_gradient(**settings: Any) -> dict[str, Tensor]:
    method = learn_tasks(1, sharpness_lr=0.5, **settings)
    method.begin_task(1, make_batches(1))
    optimizer = torch.optim.SGD(method.trained_module.parameters(), lr=0.1)
    spaces = method._weigh_bases({name: value.clone() for name, value in method._soft.items()})
    optimizer.zero_grad()
    torch.manual_seed(2)
    method._differentiate(make_batches(1)[0], 1, spaces, 0.5)
    return {name: p.grad for name, p in method.network.named_parameters() if p.grad is not None}


def test_the_second_order_is_another_gradient_than_the_first_unless_nothing_goes_uphill() -> None:
    first, second = compute_step_gradient(), compute_step_gradient(second_order=True)
    assert first.keys() == second.keys()
    assert not torch.allclose(first["hidden.0.weight"], second["hidden.0.weight"], rtol=1e-2)
    one, two = (learn_tasks(1, sharpness_lr=0.0, second_order=order) for order in (False, True))
    for method in (one, two):
        torch.manual_seed(2)
        train(method, 1)
    for name, value in one.network.state_dict().items():
        assert torch.allclose(value, two.network.state_dict()[name], atol=1e-6), name


def test_the_second_order_is_the_gradient_of_the_loss() -> None:
    method = learn_tasks(1, second_order=True)
    method.network.double()
    method.begin_task(1, make_batches(1))
    spaces = {n: s.to(torch.device("cpu"), torch.float64) for n, s in method.memory.subspaces.items()}
    inputs, labels = make_batches(1)[0]
    method.buffer.contents = {}
    weight = method.network.get_parameter("hidden.0.weight")

    def loss() -> float:
        return method._differentiate((inputs.double(), labels), 1, spaces, 0.3)

    weight.grad = None
    loss()
    assert weight.grad is not None
    gradient = weight.grad.clone()  # further calls add to it
    for row, column in ((0, 0), (3, 5), (9, 11)):
        values = []
        for shift in (1e-6, -2e-6):
            with torch.no_grad():
                weight[row, column] += shift
            values.append(loss())
        with torch.no_grad():
            weight[row, column] += 1e-6
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(float(gradient[row, column]), rel=1e-3, abs=1e-7)


def test_bases_are_computed_anew_from_stored_examples_of_all_tasks() -> None:
    method = make_method(threshold=1.0, memory_samples=50)
    torch.manual_seed(1)
    train(method, 0)
    consolidate(method, 0)
    # Three directions and the constant of the bias.
    assert method.memory.subspaces["hidden.0"].rank.tolist() == [4]
    train(method, 1)
    # The batches of the task do not matter: only the buffer is used.
    method.consolidate([], lambda batch: method.network(batch[0], 1)[:, 0])
    assert method.memory.subspaces["hidden.0"].rank.tolist() == [7]
    kept = method.buffer.contents["inputs"]
    M = method.memory.subspaces["hidden.0"].basis[0]
    rows = torch.cat([kept, torch.ones(len(kept), 1)], dim=1)
    assert torch.allclose(rows @ M @ M.T, rows, atol=1e-4)
    # What the buffer has lost, the bases lose.
    only = method.buffer.contents["heads"] == 1
    method.buffer.contents = method.buffer.take(torch.nonzero(only).flatten())
    method.consolidate([], lambda batch: method.network(batch[0], 1)[:, 0])
    assert method.memory.subspaces["hidden.0"].rank.tolist() == [4]


def test_examples_are_stored_in_the_first_epoch_or_in_every_one() -> None:
    seen = {}
    for fill in ("first-epoch", "every-epoch"):
        method = make_method(fill=fill)
        train(method, 0, epochs=3)
        seen[fill] = method.buffer.seen
        assert len(method.buffer) <= 50
    assert seen == {"first-epoch": 40, "every-epoch": 120}
    assert FSDGPM.keeps_data


def test_all_learning_rates_fall_together() -> None:
    method = learn_tasks(1)
    method.begin_task(1, make_batches(1))
    optimizer = torch.optim.SGD(method.trained_module.parameters(), lr=0.4)
    method.attach(optimizer)
    asked: list[float] = []
    differentiate = method._differentiate

    def ask(batch: Batch, head: int, spaces: Any, rate: float) -> float:
        asked.append(rate)
        return differentiate(batch, head, spaces, rate)

    method._differentiate = ask  # type: ignore[method-assign]
    for lr in (0.4, 0.1):
        optimizer.param_groups[0]["lr"] = lr
        method.step(make_batches(1)[0], 1, LATER, optimizer)
    assert asked == pytest.approx([0.001, 0.00025])


@pytest.mark.parametrize("name", ["fs-dgpm", "trgp"])
def test_stored_statistics_are_kept_for_old_tasks_unless_norms_keep_training(name: str) -> None:
    kind = METHODS[name]
    for norms, kept in (("freeze", "per-task"), ("free", "shared")):
        method: Any = kind(make_mlp(), kind.Settings(norms=norms), exclude=["heads.*"])
        assert method.norm_statistics == "shared"
        train(method, 0)
        consolidate(method, 0)
        assert method.norm_statistics == kept


def test_momentum_and_clipping_are_those_of_torch() -> None:
    method, twin = make_method(momentum=0.9, clip=0.05, sharpness_lr=0.0), make_mlp()
    other = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    method.begin_task(0, make_batches(0))
    optimizer = method.build_optimizer(torch.optim.SGD, 0.05)
    method.attach(optimizer)
    for inputs, labels in make_batches(0):
        other.zero_grad()
        F.cross_entropy(twin(inputs, 0), labels).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        other.step()
        method.step((inputs, labels), 0, LATER, optimizer)  # nothing is stored, so nothing is replayed
    for name, value in twin.state_dict().items():
        assert torch.allclose(value, method.network.state_dict()[name], atol=1e-7), name
    clipped = compute_uphill(make_method(clip=1e-4))
    assert all(float(step.abs().max()) <= 1e-4 for step in clipped.values())


def list_tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else []
    return [tensor for value in values for tensor in list_tensors(value)]


def test_bytes_are_those_of_the_state() -> None:
    method = learn_tasks(1, momentum=0.9)
    train(method, 1)
    ranks = sum(space.rank.nbytes for space in method.memory.subspaces.values())
    assert sum(method.count_bytes().values()) + ranks == sum(
        tensor.nbytes for tensor in list_tensors(method.state_dict())
    )
    assert method.count_bytes()["data"] == 50 * (4 * WIDTHS[0] + 8 + 8)


def test_soft_weights_have_momentum_if_weights_have() -> None:
    method = learn_tasks(1, soft_weights="once", momentum=0.5)
    method.begin_task(1, make_batches(1))
    for expected in (1 - 0.1, 1 - 0.1 - 0.15):  # steps of 0.1 (1, 1 + 0.5)
        take_soft_step(method, 10.0)
        assert all(float(u.max()) == pytest.approx(expected) for u in method._soft.values())
