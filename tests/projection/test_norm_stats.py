"""Running statistics of norm layers do not change while later tasks train."""

import copy
import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import SGD, Adam, Optimizer

from sgp import GradientMemory

# These layers are small, and their capacity is not tested here.
pytestmark = pytest.mark.filterwarnings("ignore:nearly all of the capacity is blocked")


class Network(nn.Module):
    """A network whose second norm layer is called twice in a forward."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm1d(8, momentum=momentum)
        self.hidden = nn.Linear(48, 12)
        self.twice = nn.BatchNorm1d(12, momentum=momentum)
        self.out = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(self.norm(self.conv(x)).relu().flatten(1))
        return self.out(self.twice(self.twice(hidden).relu()))


def make_inputs(task: int, n: int = 20) -> Tensor:
    """Return inputs whose mean and scale differ between tasks."""
    generator = torch.Generator().manual_seed(task)
    return torch.randn(n, 3, 8, generator=generator) * (1 + task) + 3 * task


def copy_statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def compute_outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Return the outputs in eval mode, and restore the flags."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    with torch.no_grad():
        outputs = model(x)
    for module, training in flags.items():
        module.training = training
    return outputs


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def list_changed(a: dict[str, Tensor], b: dict[str, Tensor]) -> set[str]:
    return {name for name in a if not torch.equal(a[name], b[name])}


def take_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def make_learned_memory(
    new_optimizer: Callable[..., Optimizer] = lambda p: SGD(p, lr=0.05),
    *,
    momentum: float | None = 0.1,
    **settings: Any,
) -> tuple[Network, GradientMemory, Optimizer]:
    """Return a model that has learned one task, its memory and the attached optimizer."""
    torch.manual_seed(0)
    model = Network(momentum)
    memory = GradientMemory(model, threshold=0.9, alpha=math.inf, **settings)
    optimizer = new_optimizer(model.parameters())
    memory.attach(optimizer)
    for _ in range(5):
        take_step(model, optimizer, make_inputs(0))
    memory.update([make_inputs(0)])
    return model, memory, optimizer


def train_with_steps(model: nn.Module, optimizer: Optimizer) -> None:
    for i in range(50):
        take_step(model, optimizer, make_inputs(1 + i % 3))


def train_without_steps(model: nn.Module, optimizer: Optimizer) -> None:
    for i in range(50):
        model(make_inputs(1 + i % 3))


def run_without_gradients(model: nn.Module, optimizer: Optimizer) -> None:
    with torch.no_grad():
        train_without_steps(model, optimizer)


def train_with_accumulation(model: nn.Module, optimizer: Optimizer) -> None:
    for i in range(50):
        model(make_inputs(1 + i % 3)).square().mean().backward()
        if i % 5 == 4:
            optimizer.step()
            optimizer.zero_grad()


def train_without_the_last_step(model: nn.Module, optimizer: Optimizer) -> None:
    for i in range(49):
        take_step(model, optimizer, make_inputs(1 + i % 3))
    model(make_inputs(3)).square().mean().backward()


LOOPS = [
    train_with_steps,
    train_without_steps,
    run_without_gradients,
    train_with_accumulation,
    train_without_the_last_step,
]
NAMES = [loop.__name__.replace("_", " ") for loop in LOOPS]


@pytest.mark.parametrize("loop", LOOPS, ids=NAMES)
@pytest.mark.parametrize("momentum", [0.1, None], ids=["momentum", "cumulative"])
@pytest.mark.parametrize("new_optimizer", [lambda p: SGD(p, lr=0.05), lambda p: Adam(p, lr=1e-2)], ids=["SGD", "Adam"])
def test_fifty_training_batches_of_another_task_do_not_change_the_statistics(
    new_optimizer: Callable[..., Optimizer],
    momentum: float | None,
    loop: Callable[[nn.Module, Optimizer], None],
) -> None:
    model, _, optimizer = make_learned_memory(new_optimizer, momentum=momentum)
    before = copy_statistics(model)
    assert float(before["norm.num_batches_tracked"]) == 5
    assert float(before["twice.num_batches_tracked"]) == 10
    weights = model.hidden.weight.detach().clone()
    loop(model, optimizer)
    assert_same(copy_statistics(model), before)
    if "step" in loop.__name__ and loop is not train_without_steps:
        assert not torch.equal(model.hidden.weight, weights)


@pytest.mark.parametrize("loop", LOOPS, ids=NAMES)
def test_old_outputs_in_eval_mode_do_not_change_when_all_weights_are_blocked(
    loop: Callable[[nn.Module, Optimizer], None],
) -> None:
    model, memory, _ = make_learned_memory()
    # Only the running statistics can change: the weights are restored.
    optimizer = SGD(model.parameters(), lr=0.0)
    memory.attach(optimizer)
    before = compute_outputs(model, make_inputs(0))
    loop(model, optimizer)
    assert torch.equal(compute_outputs(model, make_inputs(0)), before)


def test_without_freezing_the_same_batches_change_old_outputs() -> None:
    model, _, _ = make_learned_memory(rest="free")
    before = compute_outputs(model, make_inputs(0))
    train_without_steps(model, SGD(model.parameters(), lr=0.0))
    after = compute_outputs(model, make_inputs(0))
    assert (after - before).norm() > 0.1 * before.norm()


def test_old_outputs_do_not_change_while_the_new_task_is_learned() -> None:
    torch.manual_seed(0)
    model = Network()
    memory = GradientMemory(model, threshold=1, alpha=math.inf)
    optimizer = SGD(model.parameters(), lr=0.05)
    memory.attach(optimizer)
    old = make_inputs(0, n=4)[:, :1].expand(4, 3, 8)  # spans few dimensions of every layer
    new = make_inputs(1)
    for _ in range(5):
        take_step(model, optimizer, old)
    memory.update([old])
    before_old, before_new = compute_outputs(model, old), compute_outputs(model, new)
    for _ in range(50):
        take_step(model, optimizer, new)
    after_old, after_new = compute_outputs(model, old), compute_outputs(model, new)
    assert (after_old - before_old).norm() < 1e-4 * before_old.norm()
    assert (after_new - before_new).norm() > 1e-2 * before_new.norm()


def test_rest_free_lists_norm_layers_in_the_summary_and_leaves_them_free() -> None:
    model, memory, optimizer = make_learned_memory(rest="free")
    before, weights = copy_statistics(model), copy.deepcopy(model.state_dict())
    take_step(model, optimizer, make_inputs(1))
    assert list_changed(before, copy_statistics(model)) == set(before)
    assert not torch.equal(model.norm.weight, weights["norm.weight"])
    free = memory.capacity().free
    for name in ("norm", "twice"):
        assert free[f"{name}.weight"] == free[f"{name}.bias"] == "norm"
        assert free[f"{name}.running_mean"] == free[f"{name}.running_var"] == "norm statistics, norm"
    assert memory.state_dict()["statistics"] == {}


def test_frozen_norm_parameters_do_not_change() -> None:
    model, memory, optimizer = make_learned_memory()
    weights = copy.deepcopy(model.state_dict())
    train_with_steps(model, optimizer)
    for name in ("norm.weight", "norm.bias", "twice.weight", "twice.bias"):
        assert torch.equal(model.state_dict()[name], weights[name]), name
        assert memory.capacity().frozen[name] == "norm"


def test_during_the_first_task_statistics_follow_the_data() -> None:
    model, clone = Network(), Network()
    clone.load_state_dict(model.state_dict())
    memory = GradientMemory(model, threshold=0.9)
    optimizer, plain = SGD(model.parameters(), lr=0.05), SGD(clone.parameters(), lr=0.05)
    memory.attach(optimizer)
    for i in range(5):
        take_step(model, optimizer, make_inputs(i))
        take_step(clone, plain, make_inputs(i))
    assert_same(copy_statistics(model), copy_statistics(clone))
    assert float(model.norm.num_batches_tracked or 0) == 5


def test_a_forward_in_training_mode_normalizes_by_its_batch() -> None:
    model, _, optimizer = make_learned_memory()
    copied = copy.deepcopy(model)
    for i in range(3):
        assert torch.equal(model(make_inputs(i)), copied(make_inputs(i)))
    assert list_changed(copy_statistics(model), copy_statistics(copied))
    assert optimizer.state_dict()


def run_several_backwards(model: nn.Module) -> list[Tensor]:
    """Return gradients of forwards that run before the backward of others, in both modes."""
    x, y = make_inputs(1), make_inputs(2)
    model.zero_grad()
    first, second = model(x), model(y)
    model.eval()
    evaluated = model(x)
    model.train()
    third = model(y)
    first.square().mean().backward(retain_graph=True)
    second.square().mean().backward()
    first.mean().backward()
    third.square().mean().backward()
    evaluated.square().mean().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return gradients


def test_backward_works_after_the_statistics_are_restored() -> None:
    model, _, optimizer = make_learned_memory()
    before = copy_statistics(model)
    # Without a memory: norm layers that have no momentum do not change.
    still = copy.deepcopy(model)
    still.norm.momentum = still.twice.momentum = 0.0
    for found, expected in zip(run_several_backwards(model), run_several_backwards(still), strict=True):
        torch.testing.assert_close(found, expected)
    assert_same(copy_statistics(model), before)
    assert optimizer.state_dict()


def test_excluded_norm_layers_are_free() -> None:
    model, memory, optimizer = make_learned_memory(exclude=["twice"])
    before = copy_statistics(model)
    train_with_steps(model, optimizer)
    assert list_changed(before, copy_statistics(model)) == {name for name in before if name.startswith("twice")}
    assert float(model.twice.num_batches_tracked or 0) == 10 + 100
    assert {name.partition(".")[0] for name in memory.state_dict()["statistics"]} == {"norm"}
    assert memory.capacity().free["twice.running_mean"] == "norm statistics, excluded by 'twice'"


@pytest.mark.parametrize("how", ["deepcopy", "whole file"])
def test_statistics_of_model_copies_are_not_frozen(how: str, tmp_path: Path) -> None:
    model, _, _ = make_learned_memory()
    if how == "deepcopy":
        copied = copy.deepcopy(model)
    else:
        torch.save(model, tmp_path / "model.pt")
        copied = torch.load(tmp_path / "model.pt", weights_only=False)
    before = copy_statistics(model)
    copied(make_inputs(1))
    assert list_changed(before, copy_statistics(copied)) == set(before)
    model(make_inputs(1))
    assert_same(copy_statistics(model), before)


def test_modules_in_eval_mode_use_the_stored_statistics_and_do_not_change() -> None:
    model, _, _ = make_learned_memory()
    model.eval()
    with torch.no_grad():
        assert model.norm.running_mean is not None
        model.norm.running_mean.add_(1)
    shifted = copy_statistics(model)
    model(make_inputs(1))
    assert_same(copy_statistics(model), shifted)


@pytest.mark.parametrize("how", ["dropped", "detached"])
def test_without_an_attached_optimizer_the_statistics_change_again(how: str) -> None:
    model, memory, optimizer = make_learned_memory()
    before = copy_statistics(model)
    model(make_inputs(1))
    assert_same(copy_statistics(model), before)
    hook = memory.attach(optimizer)
    if how == "detached":
        hook.detach()
    else:
        del optimizer
        gc.collect()
    model(make_inputs(1))
    assert list_changed(before, copy_statistics(model)) == set(before)


def test_attaching_the_next_optimizer_restores_the_statistics_of_the_first_task() -> None:
    model, memory, optimizer = make_learned_memory()
    before = copy_statistics(model)
    memory.attach(optimizer).detach()
    model(make_inputs(1))
    following = SGD(model.parameters(), lr=0.05)
    memory.attach(following)
    take_step(model, following, make_inputs(1))
    assert_same(copy_statistics(model), before)


def test_statistics_after_the_third_task_are_those_of_the_first() -> None:
    model, memory, optimizer = make_learned_memory()
    before = copy_statistics(model)
    for task in (1, 2):
        for _ in range(3):
            take_step(model, optimizer, make_inputs(task))
        memory.update([make_inputs(task)])
        assert_same(copy_statistics(model), before)
    assert memory.tasks == 3


def test_a_norm_layer_that_is_added_later_is_frozen_from_the_next_update_on() -> None:
    class Growing(Network):
        def __init__(self) -> None:
            super().__init__()
            self.later = nn.ModuleList()

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            for module in self.later:
                x = module(x)
            return x

    torch.manual_seed(0)
    model = Growing()
    memory = GradientMemory(model, threshold=0.9)
    optimizer = SGD(model.parameters(), lr=0.05)
    memory.attach(optimizer)
    take_step(model, optimizer, make_inputs(0))
    memory.update([make_inputs(0)])
    model.later.append(nn.BatchNorm1d(4))
    optimizer.add_param_group({"params": list(model.later.parameters())})
    first = copy_statistics(model)
    take_step(model, optimizer, make_inputs(1))
    assert {name.split(".")[0] for name in list_changed(first, copy_statistics(model))} == {"later"}
    memory.update([make_inputs(1)])
    second = copy_statistics(model)
    take_step(model, optimizer, make_inputs(2))
    assert_same(copy_statistics(model), second)


def test_a_norm_layer_that_is_replaced_leaves_nothing_behind() -> None:
    model, memory, optimizer = make_learned_memory()
    stored = copy_statistics(model)
    old, model.norm = model.norm, nn.BatchNorm1d(8)
    optimizer.add_param_group({"params": list(model.norm.parameters())})
    memory.update([make_inputs(0)], allow_unattached=True)
    take_step(model, optimizer, make_inputs(1))
    assert_same(copy_statistics(model), stored)  # values belong to the name of a layer, as bases do
    outside = {name: buffer.clone() for name, buffer in old.named_buffers()}
    old(torch.randn(5, 8, 4))
    assert list_changed(outside, dict(old.named_buffers())) == set(outside)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(6),
        nn.BatchNorm2d(6, affine=False),
        nn.InstanceNorm2d(6, track_running_stats=True),
        nn.SyncBatchNorm(6),
    ],
    ids=["BatchNorm2d", "without parameters", "InstanceNorm2d", "SyncBatchNorm"],
)
def test_every_norm_layer_with_statistics_is_frozen(norm: nn.Module) -> None:
    if isinstance(norm, nn.SyncBatchNorm):
        norm = type("CpuSyncBatchNorm", (nn.SyncBatchNorm,), {"forward": nn.BatchNorm2d.forward})(6)
        norm._check_input_dim = lambda x: None
    model = nn.Sequential(nn.Conv2d(3, 6, 3), norm)
    memory = GradientMemory(model, threshold=0.9)
    optimizer = SGD(model.parameters(), lr=0.05)
    memory.attach(optimizer)
    x = torch.randn(4, 3, 6, 6)
    take_step(model, optimizer, x)
    memory.update([x])
    before = copy_statistics(model)
    assert before
    for _ in range(5):
        take_step(model, optimizer, x + 3)
    assert_same(copy_statistics(model), before)


def test_norm_layers_may_have_no_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.LayerNorm(6))
    memory = GradientMemory(model, threshold=0.9)
    optimizer = SGD(model.parameters(), lr=0.05)
    memory.attach(optimizer)
    memory.update([torch.randn(20, 4)])
    take_step(model, optimizer, torch.randn(20, 4))
    assert memory.state_dict()["statistics"] == {}


def test_statistics_stay_frozen_after_a_change_of_dtype() -> None:
    model, memory, _ = make_learned_memory()
    model.double()
    optimizer = SGD(model.parameters(), lr=0.05)
    memory.attach(optimizer)
    before = copy_statistics(model)
    assert before["norm.running_mean"].dtype == torch.float64
    take_step(model, optimizer, make_inputs(1).double())
    assert_same(copy_statistics(model), before)


def test_the_statistics_of_a_compiled_model_are_restored_after_each_step() -> None:
    torch._dynamo.reset()
    model, memory, optimizer = make_learned_memory()
    before = copy_statistics(model)
    model.compile(backend="eager")
    for i in range(3):
        take_step(model, optimizer, make_inputs(1 + i))
        assert_same(copy_statistics(model), before)
    model(make_inputs(1))
    memory.update([make_inputs(1)])
    assert_same(copy_statistics(model), before)
    torch._dynamo.reset()


def test_saved_and_loaded_statistics_stay_frozen_at_their_values(tmp_path: Path) -> None:
    model, memory, _ = make_learned_memory()
    before = copy_statistics(model)
    memory.save(tmp_path / "memory")
    torch.manual_seed(5)
    fresh = Network()
    loaded = GradientMemory.from_file(fresh, tmp_path / "memory")
    optimizer = SGD(fresh.parameters(), lr=0.05)
    loaded.attach(optimizer)
    assert_same(loaded.state_dict()["statistics"], memory.state_dict()["statistics"])
    take_step(fresh, optimizer, make_inputs(1))
    assert_same(copy_statistics(fresh), before)
    # The loaded values are copies: the other memory continues without them.
    with torch.no_grad():
        loaded.state_dict()["statistics"]["norm.running_mean"].add_(1)
    assert_same(memory.state_dict()["statistics"], before)


def test_the_frozen_values_are_copies() -> None:
    model, memory, _ = make_learned_memory()
    stored = {name: value.clone() for name, value in memory.state_dict()["statistics"].items()}
    model.load_state_dict(Network().state_dict())
    assert_same(memory.state_dict()["statistics"], stored)


def test_no_hook_is_left_after_the_memory_is_deleted() -> None:
    hooks = torch_module._global_forward_hooks
    gc.collect()
    nn.Identity()(None)  # a hook that is not needed any more is removed by the next call of a module
    before = len(hooks)
    model, memory, optimizer = make_learned_memory()
    assert len(hooks) > before
    assert memory.tasks == 1
    del memory, optimizer
    gc.collect()
    statistics = copy_statistics(model)
    model(make_inputs(1))
    assert len(hooks) == before
    assert list_changed(statistics, copy_statistics(model)) == set(statistics)


def test_two_memories_of_one_model_are_independent() -> None:
    model, _, _ = make_learned_memory()
    attached, bystander = (GradientMemory(model, threshold=0.9) for _ in range(2))
    optimizer = SGD(model.parameters(), lr=0.05)
    attached.attach(optimizer)
    attached.update([make_inputs(0)])
    bystander.update([make_inputs(0)])
    before = copy_statistics(model)
    model(make_inputs(1))
    assert_same(copy_statistics(model), before)
