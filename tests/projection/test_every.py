"""Projection of the change of several steps at once."""

import copy
import gc
import io
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sgp
from sgp.projection import OptimizerHook

OLD = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def make_batch(step: int) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(100 + step))


def make_setup(
    every: int, *, alpha: float = 5.0, lr: float = 0.05, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, sgp.GradientMemory, torch.optim.Optimizer, OptimizerHook]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 3)).to(dtype)
    memory = sgp.GradientMemory(model, threshold=0.99, alpha=alpha)
    memory.update([OLD.to(dtype)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return model, memory, optimizer, memory.attach(optimizer, every=every)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(first, first + steps):
        optimizer.zero_grad()
        (model(make_batch(step).to(dtype)) - 1).square().mean().backward()
        optimizer.step()


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 0.0) -> None:
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=0, atol=tolerance)


def test_only_the_change_since_the_last_projection_is_projected() -> None:
    model, memory, optimizer, _ = make_setup(4)
    plain, _, free, hook = make_setup(4)
    hook.detach()
    start = copy_weights(model)
    train(model, optimizer, 4)
    frozen = {name: p for name, p in plain.named_parameters() if name.startswith("1.")}
    free.param_groups[0]["params"] = [p for n, p in plain.named_parameters() if n not in frozen]
    train(plain, free, 4)
    for layer in ("0", "3"):
        change = [copy_weights(plain)[f"{layer}.{leaf}"] - start[f"{layer}.{leaf}"] for leaf in ("weight", "bias")]
        wanted = memory.project(change[0], layer, change[1])
        assert isinstance(wanted, tuple)
        found = [copy_weights(model)[f"{layer}.{leaf}"] - start[f"{layer}.{leaf}"] for leaf in ("weight", "bias")]
        torch.testing.assert_close(found[0], wanted[0])
        torch.testing.assert_close(found[1], wanted[1])


@pytest.mark.parametrize("every", [2, 5, 8])
def test_protection_holds_at_every_multiple_and_not_in_between(every: int) -> None:
    model, memory, optimizer, _ = make_setup(every, alpha=math.inf)
    before = model(OLD.double()).detach()
    for step in range(3 * every):
        train(model, optimizer, 1, step)
        drift = float((model(OLD.double()).detach() - before).norm() / before.norm())
        assert memory.tasks == 1
        if (step + 1) % every == 0:
            assert memory.check(OLD.double()).leak < 1e-6
            assert drift < 0.05  # the bases capture 99 % of the inputs
        else:
            assert memory.check(OLD.double()).leak > 1e-3


def test_norm_layers_are_restored_at_every_step() -> None:
    model, _, optimizer, _ = make_setup(8)
    norm = model[1].weight.detach().clone()
    train(model, optimizer, 3)
    assert torch.equal(model[1].weight, norm)


def test_flush_projects_immediately_and_only_once() -> None:
    model, memory, optimizer, hook = make_setup(8, alpha=math.inf)
    train(model, optimizer, 3)
    hook.flush()
    flushed = copy_weights(model)
    assert memory.check(OLD.double()).leak < 1e-6
    hook.flush()
    assert_same(copy_weights(model), flushed)


def test_an_evaluation_sees_projected_weights_and_changes_nothing() -> None:
    model, memory, optimizer, hook = make_setup(8, alpha=math.inf)
    twin, _, twin_optimizer, _ = make_setup(8, alpha=math.inf)
    for step in range(20):
        train(model, optimizer, 1, step)
        train(twin, twin_optimizer, 1, step)
        before = copy_weights(model)
        with hook.projected():
            assert memory.check(OLD.double()).leak < 1e-6
        assert_same(copy_weights(model), before)
    assert_same(copy_weights(model), copy_weights(twin))


def test_weights_are_restored_if_an_evaluation_fails() -> None:
    model, _, optimizer, hook = make_setup(8)
    train(model, optimizer, 3)
    before = copy_weights(model)
    with pytest.raises(KeyError), hook.projected():
        raise KeyError
    assert_same(copy_weights(model), before)


def test_steps_updates_and_loading_are_refused_during_an_evaluation() -> None:
    model, memory, optimizer, hook = make_setup(8, alpha=math.inf)
    twin, _, twin_optimizer, _ = make_setup(8, alpha=math.inf)
    second = torch.optim.SGD(model[3].parameters(), lr=0.1)
    memory.attach(second)
    saved, saved_hook = memory.state_dict(), hook.state_dict()
    train(model, optimizer, 3)
    train(twin, twin_optimizer, 3)
    tried: list[tuple[str, Callable[[], object]]] = [
        ("a step", optimizer.step),
        ("a step", second.step),
        ("an update", lambda: memory.update([OLD.double()])),
        ("detach", hook.detach),
        ("detach", lambda: memory.attach(optimizer)),
        ("load_state_dict", lambda: hook.load_state_dict(saved_hook)),
        ("other bases", lambda: memory.load_state_dict(saved)),
    ]
    for what, act in tried:
        with hook.projected():
            with hook.projected():
                pass
            with pytest.raises(RuntimeError, match=f"inside hook.projected.*{what}.*leave the with block first"):
                act()
    assert (hook.steps, hook.is_attached, memory.tasks) == (3, True, 1)
    train(model, optimizer, 5, 3)
    train(twin, twin_optimizer, 5, 3)
    assert_same(copy_weights(model), copy_weights(twin))


def make_leak_function(model: nn.Module, memory: sgp.GradientMemory) -> Callable[[], float]:
    """Return a function that measures the change of the first layer along its blocked bases since the start."""
    start, blocked = copy_weights(make_setup(8)[0]), memory.subspaces["0"]

    def leak() -> float:
        change = copy_weights(model)["0.weight"] - start["0.weight"], copy_weights(model)["0.bias"] - start["0.bias"]
        return float(blocked.compute_blocked_coefficients(*(part.unsqueeze(0) for part in change)).norm())

    return leak


@pytest.mark.parametrize("take", ["model", "a part of it", "optimizer", "hook", "update", "detach"])
def test_a_pending_change_is_projected_before_saving_updating_and_detaching(take: str) -> None:
    model, memory, optimizer, hook = make_setup(8, alpha=math.inf)
    train(model, optimizer, 3)
    leak = make_leak_function(model, memory)
    assert leak() > 1e-3
    if take == "model":
        model.state_dict()
    elif take == "a part of it":
        model[0].state_dict()
    elif take == "optimizer":
        optimizer.state_dict()
    elif take == "hook":
        hook.state_dict()
    elif take == "update":
        memory.update([make_batch(0)[:1].double()])
    else:
        hook.detach()
    assert leak() < 1e-6


def test_a_resumed_run_projects_at_the_same_steps() -> None:
    model, memory, optimizer, hook = make_setup(8)
    train(model, optimizer, 11)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), memory.state_dict(), hook.state_dict()))
    assert state[-1]["steps"] == 11
    train(model, optimizer, 7, 11)
    again, other, second, resumed = make_setup(8)
    again.load_state_dict(state[0])
    second.load_state_dict(state[1])
    other.load_state_dict(state[2])
    resumed.load_state_dict(state[3])
    train(again, second, 7, 11)
    assert_same(copy_weights(again), copy_weights(model))


def test_copies_and_files_of_the_model_have_no_trace_of_the_hook(tmp_path: Path) -> None:
    model, _, optimizer, hook = make_setup(8)
    train(model, optimizer, 3)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    before = copy_weights(model)
    twin.state_dict()
    loaded.state_dict()
    assert_same(copy_weights(model), before)
    hook.detach()
    assert not any(m._state_dict_pre_hooks or m._load_state_dict_pre_hooks for m in model.modules())


@pytest.mark.parametrize("take", ["model", "update", "another optimizer"])
def test_a_pending_change_of_a_deleted_optimizer_is_projected(take: str) -> None:
    model, memory, optimizer, hook = make_setup(8, alpha=math.inf)
    train(model, optimizer, 3)
    leak = make_leak_function(model, memory)
    left, gone = weakref.ref(hook), weakref.ref(optimizer)
    del optimizer, hook
    gc.collect()
    assert gone() is None
    assert leak() > 1e-3
    if take == "model":
        model.state_dict()
    elif take == "update":
        memory.update([make_batch(0)[:1].double()])
    else:
        second = torch.optim.AdamW(model.parameters(), lr=0.05)
        memory.attach(second)
        train(model, second, 1)
    assert leak() < 1e-6
    gc.collect()
    assert left() is None


def make_unit_steps(optimizers: list[torch.optim.Optimizer], steps: int) -> None:
    """Set gradients that do not depend on the weights, so that the sum of changes does not depend on the projection."""
    for step in range(steps):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    generator = torch.Generator().manual_seed(step + parameter.numel())
                    parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            optimizer.step()


@pytest.mark.parametrize("split", ["weights and biases", "all twice"])
def test_two_optimizers_of_the_same_layers_project_their_own_changes_only(split: str) -> None:
    found = []
    for every in (1, 3):
        model, memory, _, hook = make_setup(1)
        hook.detach()
        named = list(model.named_parameters())
        halves = [[p for n, p in named if n.endswith(leaf)] for leaf in ("weight", "bias")]
        if split == "all twice":
            halves = [[p for _, p in named]] * 2
        optimizers = [torch.optim.SGD(half, lr=0.01) for half in halves]
        hooks = [memory.attach(optimizer, mode="step", every=every) for optimizer in optimizers]
        make_unit_steps(list(optimizers), 4)
        for hook in hooks:
            hook.flush()
        found.append(copy_weights(model))
    assert_same(found[0], found[1], 1e-12)


def test_a_bias_without_an_optimizer_changes_with_its_weight_and_an_update_accepts_it() -> None:
    model, memory, _, hook = make_setup(1)
    hook.detach()
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if "weight" in name], lr=0.05)
    hook = memory.attach(optimizer, every=8)
    bias = copy_weights(model)["0.bias"]
    train(model, optimizer, 3)
    with hook.projected():
        assert not torch.equal(copy_weights(model)["0.bias"], bias)
    assert torch.equal(copy_weights(model)["0.bias"], bias)
    train(model, optimizer, 2)
    memory.update([make_batch(0)[:1].double()])
    assert not torch.equal(copy_weights(model)["0.bias"], bias)
    assert memory.tasks == 2


@pytest.mark.parametrize("leaves", ["weight and bias", "the weight alone", "everything"])
def test_a_layer_that_is_removed_from_the_optimizer_is_projected(leaves: str) -> None:
    model, memory, _, hook = make_setup(1, alpha=math.inf)
    hook.detach()
    first, last = list(model[0].parameters()), list(model[3].parameters())
    optimizer = torch.optim.AdamW([{"params": first}, {"params": last}], lr=0.05)
    hook = memory.attach(optimizer, every=8)
    train(model, optimizer, 3)
    if leaves == "weight and bias":
        optimizer.param_groups.pop(0)
    elif leaves == "the weight alone":
        optimizer.param_groups[0]["params"].remove(first[0])
    else:
        optimizer.param_groups.clear()
    train(model, optimizer, 1, 3)  # the pending change is projected before other layers
    left = first[0].detach().clone()
    train(model, optimizer, 1, 4)
    assert torch.equal(first[0], left)
    train(model, optimizer, 3, 5)
    assert memory.check(OLD.double()).leak < 1e-6
    memory.update([make_batch(0)[:1].double()])


def test_loading_weights_is_not_a_change_by_steps() -> None:
    model, memory, optimizer, hook = make_setup(8)
    other = {name: value + 1 for name, value in model.state_dict().items()}
    train(model, optimizer, 3)
    model.load_state_dict(other)
    hook.flush()
    memory.check(OLD.double())
    assert_same(copy_weights(model), other)


def test_a_pending_change_is_projected_before_another_memory_is_loaded() -> None:
    model, memory, optimizer, hook = make_setup(8)
    twin, _, twin_optimizer, twin_hook = make_setup(8)
    train(model, optimizer, 3)
    train(twin, twin_optimizer, 3)
    memory.load_state_dict(sgp.GradientMemory(model, threshold=0.99, alpha=5.0).state_dict())  # a memory without tasks
    twin_hook.flush()
    assert_same(copy_weights(model), copy_weights(twin))
    train(model, optimizer, 6, 3)
    hook.flush()
    assert hook.steps == 9


def test_a_check_between_projections_changes_nothing() -> None:
    model, memory, optimizer, _ = make_setup(8)
    twin, _, twin_optimizer, _ = make_setup(8)
    for step in range(8):
        train(model, optimizer, 1, step)
        train(twin, twin_optimizer, 1, step)
        memory.check(OLD.double())
    assert_same(copy_weights(model), copy_weights(twin))


def test_masters_of_16_bit_weights_are_projected() -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="master"):
        model, _, optimizer, _ = make_setup(4, alpha=math.inf, lr=0.02, dtype=torch.bfloat16)
    before = model(OLD.bfloat16()).detach().float()
    train(model, optimizer, 16)
    after = model(OLD.bfloat16()).detach().float()
    assert float((after - before).norm() / before.norm()) < 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "at least 1, got 0"),
        ({"every": 1.5}, "whole number"),
        ({"every": 2, "mode": "gradient"}, "every=2 needs"),
        ({"every": 2, "mode": "input"}, "every=2 needs"),
    ],
)
def test_an_invalid_number_of_steps_is_refused(settings: dict[str, Any], message: str) -> None:
    model = nn.Linear(3, 2)
    memory = sgp.GradientMemory(model, threshold=0.9)
    with pytest.raises(ValueError, match=message):
        memory.attach(torch.optim.SGD(model.parameters(), lr=0.1), **settings)
