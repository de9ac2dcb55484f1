"""Running statistics of norm layers stay where they are while other tasks train."""

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

# These layers are small, and that they are full is not what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:nearly all of the capacity is blocked")


class Network(nn.Module):
    """The second norm layer is used twice in a forward."""

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


def inputs(task: int, n: int = 20) -> Tensor:
    """Each task has a mean and a scale of its own, which the statistics follow."""
    generator = torch.Generator().manual_seed(task)
    return torch.randn(n, 3, 8, generator=generator) * (1 + task) + 3 * task


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def outputs_of(model: nn.Module, x: Tensor) -> Tensor:
    """What the model gives in eval mode; its flags come back."""
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


def moved(a: dict[str, Tensor], b: dict[str, Tensor]) -> set[str]:
    return {name for name in a if not torch.equal(a[name], b[name])}


def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def learned(
    new_optimizer: Callable[..., Optimizer] = lambda p: SGD(p, lr=0.05),
    *,
    momentum: float | None = 0.1,
    **settings: Any,
) -> tuple[Network, GradientMemory, Optimizer]:
    """A model that has learned one task, its memory and the attached optimizer."""
    torch.manual_seed(0)
    model = Network(momentum)
    memory = GradientMemory(model, threshold=0.9, alpha=math.inf, **settings)
    optimizer = new_optimizer(model.parameters())
    memory.attach(optimizer)
    for _ in range(5):
        step(model, optimizer, inputs(0))
    memory.update([inputs(0)])
    return model, memory, optimizer


def with_steps(model: nn.Module, optimizer: Optimizer) -> None:
    for i in range(50):
        step(model, optimizer, inputs(1 + i % 3))


def without_steps(model: nn.Module, optimizer: Optimizer) -> None:
    for i in range(50):
        model(inputs(1 + i % 3))


def without_gradients(model: nn.Module, optimizer: Optimizer) -> None:
    with torch.no_grad():
        without_steps(model, optimizer)


def with_accumulation(model: nn.Module, optimizer: Optimizer) -> None:
    for i in range(50):
        model(inputs(1 + i % 3)).square().mean().backward()
        if i % 5 == 4:
            optimizer.step()
            optimizer.zero_grad()


def with_the_last_step_missing(model: nn.Module, optimizer: Optimizer) -> None:
    for i in range(49):
        step(model, optimizer, inputs(1 + i % 3))
    model(inputs(3)).square().mean().backward()


LOOPS = [with_steps, without_steps, without_gradients, with_accumulation, with_the_last_step_missing]
NAMES = [loop.__name__.replace("_", " ") for loop in LOOPS]


@pytest.mark.parametrize("loop", LOOPS, ids=NAMES)
@pytest.mark.parametrize("momentum", [0.1, None], ids=["momentum", "cumulative"])
@pytest.mark.parametrize("new_optimizer", [lambda p: SGD(p, lr=0.05), lambda p: Adam(p, lr=1e-2)], ids=["SGD", "Adam"])
def test_fifty_training_batches_of_another_task_leave_the_statistics_unmoved(
    new_optimizer: Callable[..., Optimizer],
    momentum: float | None,
    loop: Callable[[nn.Module, Optimizer], None],
) -> None:
    model, _, optimizer = learned(new_optimizer, momentum=momentum)
    before = statistics_of(model)
    assert float(before["norm.num_batches_tracked"]) == 5
    assert float(before["twice.num_batches_tracked"]) == 10
    weights = model.hidden.weight.detach().clone()
    loop(model, optimizer)
    assert_same(statistics_of(model), before)
    if "step" in loop.__name__ and loop is not without_steps:
        assert not torch.equal(model.hidden.weight, weights)


@pytest.mark.parametrize("loop", LOOPS, ids=NAMES)
def test_old_outputs_in_eval_mode_do_not_move_when_all_else_is_blocked(
    loop: Callable[[nn.Module, Optimizer], None],
) -> None:
    model, memory, _ = learned()
    # Nothing but the running statistics can move: the weights are held by another hand.
    optimizer = SGD(model.parameters(), lr=0.0)
    memory.attach(optimizer)
    before = outputs_of(model, inputs(0))
    loop(model, optimizer)
    assert torch.equal(outputs_of(model, inputs(0)), before)


def test_without_the_freeze_the_same_batches_move_old_outputs() -> None:
    model, _, _ = learned(rest="free")
    before = outputs_of(model, inputs(0))
    without_steps(model, SGD(model.parameters(), lr=0.0))
    after = outputs_of(model, inputs(0))
    assert (after - before).norm() > 0.1 * before.norm()


def test_old_outputs_do_not_move_while_the_new_task_is_learned() -> None:
    torch.manual_seed(0)
    model = Network()
    memory = GradientMemory(model, threshold=1, alpha=math.inf)
    optimizer = SGD(model.parameters(), lr=0.05)
    memory.attach(optimizer)
    old = inputs(0, n=4)[:, :1].expand(4, 3, 8)  # spans few dimensions of every layer
    new = inputs(1)
    for _ in range(5):
        step(model, optimizer, old)
    memory.update([old])
    before_old, before_new = outputs_of(model, old), outputs_of(model, new)
    for _ in range(50):
        step(model, optimizer, new)
    after_old, after_new = outputs_of(model, old), outputs_of(model, new)
    assert (after_old - before_old).norm() < 1e-4 * before_old.norm()
    assert (after_new - before_new).norm() > 1e-2 * before_new.norm()


def test_rest_free_lists_norm_layers_in_the_summary_and_lets_them_move() -> None:
    model, memory, optimizer = learned(rest="free")
    before, weights = statistics_of(model), copy.deepcopy(model.state_dict())
    step(model, optimizer, inputs(1))
    assert moved(before, statistics_of(model)) == set(before)
    assert not torch.equal(model.norm.weight, weights["norm.weight"])
    free = memory.capacity().free
    for name in ("norm", "twice"):
        assert free[f"{name}.weight"] == free[f"{name}.bias"] == "norm"
        assert free[f"{name}.running_mean"] == free[f"{name}.running_var"] == "norm statistics, norm"
    assert memory.state_dict()["statistics"] == {}


def test_frozen_norm_parameters_do_not_move_either() -> None:
    model, memory, optimizer = learned()
    weights = copy.deepcopy(model.state_dict())
    with_steps(model, optimizer)
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
        step(model, optimizer, inputs(i))
        step(clone, plain, inputs(i))
    assert_same(statistics_of(model), statistics_of(clone))
    assert float(model.norm.num_batches_tracked or 0) == 5


def test_the_training_forward_itself_normalises_by_the_batch_as_ever() -> None:
    model, _, optimizer = learned()
    copied = copy.deepcopy(model)
    for i in range(3):
        assert torch.equal(model(inputs(i)), copied(inputs(i)))
    assert moved(statistics_of(model), statistics_of(copied))
    assert optimizer.state_dict()


def several_backwards(model: nn.Module) -> list[Tensor]:
    """Gradients of forwards that wait for their backward while others run, in both modes."""
    x, y = inputs(1), inputs(2)
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


def test_backward_works_after_the_statistics_are_put_back() -> None:
    model, _, optimizer = learned()
    before = statistics_of(model)
    # With nothing to put back: norm layers that have no momentum do not move either.
    still = copy.deepcopy(model)
    still.norm.momentum = still.twice.momentum = 0.0
    for found, expected in zip(several_backwards(model), several_backwards(still), strict=True):
        torch.testing.assert_close(found, expected)
    assert_same(statistics_of(model), before)
    assert optimizer.state_dict()


def test_excluded_norm_layers_are_left_alone() -> None:
    model, memory, optimizer = learned(exclude=["twice"])
    before = statistics_of(model)
    with_steps(model, optimizer)
    assert moved(before, statistics_of(model)) == {name for name in before if name.startswith("twice")}
    assert float(model.twice.num_batches_tracked or 0) == 10 + 100
    assert {name.partition(".")[0] for name in memory.state_dict()["statistics"]} == {"norm"}
    assert memory.capacity().free["twice.running_mean"] == "norm statistics, excluded by 'twice'"


@pytest.mark.parametrize("how", ["deepcopy", "whole file"])
def test_copies_of_the_model_are_not_held(how: str, tmp_path: Path) -> None:
    model, _, _ = learned()
    if how == "deepcopy":
        copied = copy.deepcopy(model)
    else:
        torch.save(model, tmp_path / "model.pt")
        copied = torch.load(tmp_path / "model.pt", weights_only=False)
    before = statistics_of(model)
    copied(inputs(1))
    assert moved(before, statistics_of(copied)) == set(before)
    model(inputs(1))
    assert_same(statistics_of(model), before)


def test_modules_in_eval_mode_use_what_is_stored_and_are_not_touched() -> None:
    model, _, _ = learned()
    model.eval()
    with torch.no_grad():
        assert model.norm.running_mean is not None
        model.norm.running_mean.add_(1)
    shifted = statistics_of(model)
    model(inputs(1))
    assert_same(statistics_of(model), shifted)


@pytest.mark.parametrize("how", ["dropped", "detached"])
def test_without_an_attached_optimizer_the_statistics_move_again(how: str) -> None:
    model, memory, optimizer = learned()
    before = statistics_of(model)
    model(inputs(1))
    assert_same(statistics_of(model), before)
    hook = memory.attach(optimizer)
    if how == "detached":
        hook.detach()
    else:
        del optimizer
        gc.collect()
    model(inputs(1))
    assert moved(before, statistics_of(model)) == set(before)


def test_the_next_optimizer_finds_the_statistics_of_the_first_task_again() -> None:
    model, memory, optimizer = learned()
    before = statistics_of(model)
    memory.attach(optimizer).detach()
    model(inputs(1))
    following = SGD(model.parameters(), lr=0.05)
    memory.attach(following)
    step(model, following, inputs(1))
    assert_same(statistics_of(model), before)


def test_statistics_are_those_of_the_first_task_also_after_the_third() -> None:
    model, memory, optimizer = learned()
    before = statistics_of(model)
    for task in (1, 2):
        for _ in range(3):
            step(model, optimizer, inputs(task))
        memory.update([inputs(task)])
        assert_same(statistics_of(model), before)
    assert memory.tasks == 3


def test_a_norm_layer_that_comes_later_is_held_from_the_next_update_on() -> None:
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
    step(model, optimizer, inputs(0))
    memory.update([inputs(0)])
    model.later.append(nn.BatchNorm1d(4))
    optimizer.add_param_group({"params": list(model.later.parameters())})
    first = statistics_of(model)
    step(model, optimizer, inputs(1))
    assert {name.split(".")[0] for name in moved(first, statistics_of(model))} == {"later"}
    memory.update([inputs(1)])
    second = statistics_of(model)
    step(model, optimizer, inputs(2))
    assert_same(statistics_of(model), second)


def test_a_norm_layer_that_is_replaced_leaves_nothing_behind() -> None:
    model, memory, optimizer = learned()
    held = statistics_of(model)
    old, model.norm = model.norm, nn.BatchNorm1d(8)
    optimizer.add_param_group({"params": list(model.norm.parameters())})
    memory.update([inputs(0)], allow_unattached=True)
    step(model, optimizer, inputs(1))
    assert_same(statistics_of(model), held)  # as bases do, values go by the layer's name
    outside = {name: buffer.clone() for name, buffer in old.named_buffers()}
    old(torch.randn(5, 8, 4))
    assert moved(outside, dict(old.named_buffers())) == set(outside)


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
def test_every_norm_layer_with_statistics_is_held(norm: nn.Module) -> None:
    if isinstance(norm, nn.SyncBatchNorm):
        norm = type("CpuSyncBatchNorm", (nn.SyncBatchNorm,), {"forward": nn.BatchNorm2d.forward})(6)
        norm._check_input_dim = lambda x: None
    model = nn.Sequential(nn.Conv2d(3, 6, 3), norm)
    memory = GradientMemory(model, threshold=0.9)
    optimizer = SGD(model.parameters(), lr=0.05)
    memory.attach(optimizer)
    x = torch.randn(4, 3, 6, 6)
    step(model, optimizer, x)
    memory.update([x])
    before = statistics_of(model)
    assert before
    for _ in range(5):
        step(model, optimizer, x + 3)
    assert_same(statistics_of(model), before)


def test_norm_layers_without_statistics_are_no_obstacle() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.LayerNorm(6))
    memory = GradientMemory(model, threshold=0.9)
    optimizer = SGD(model.parameters(), lr=0.05)
    memory.attach(optimizer)
    memory.update([torch.randn(20, 4)])
    step(model, optimizer, torch.randn(20, 4))
    assert memory.state_dict()["statistics"] == {}


def test_a_change_of_dtype_does_not_stop_it() -> None:
    model, memory, _ = learned()
    model.double()
    optimizer = SGD(model.parameters(), lr=0.05)
    memory.attach(optimizer)
    before = statistics_of(model)
    assert before["norm.running_mean"].dtype == torch.float64
    step(model, optimizer, inputs(1).double())
    assert_same(statistics_of(model), before)


def test_a_compiled_model_has_its_statistics_back_after_each_step() -> None:
    torch._dynamo.reset()
    model, memory, optimizer = learned()
    before = statistics_of(model)
    model.compile(backend="eager")
    for i in range(3):
        step(model, optimizer, inputs(1 + i))
        assert_same(statistics_of(model), before)
    model(inputs(1))
    memory.update([inputs(1)])
    assert_same(statistics_of(model), before)
    torch._dynamo.reset()


def test_saved_and_loaded_statistics_are_held_where_they_were(tmp_path: Path) -> None:
    model, memory, _ = learned()
    before = statistics_of(model)
    memory.save(tmp_path / "memory")
    torch.manual_seed(5)
    fresh = Network()
    loaded = GradientMemory.from_file(fresh, tmp_path / "memory")
    optimizer = SGD(fresh.parameters(), lr=0.05)
    loaded.attach(optimizer)
    assert_same(loaded.state_dict()["statistics"], memory.state_dict()["statistics"])
    step(fresh, optimizer, inputs(1))
    assert_same(statistics_of(fresh), before)
    # What was loaded is the memory's own: the other one goes on without it.
    with torch.no_grad():
        loaded.state_dict()["statistics"]["norm.running_mean"].add_(1)
    assert_same(memory.state_dict()["statistics"], before)


def test_the_values_of_a_memory_are_not_those_of_the_model() -> None:
    model, memory, _ = learned()
    held = {name: value.clone() for name, value in memory.state_dict()["statistics"].items()}
    model.load_state_dict(Network().state_dict())
    assert_same(memory.state_dict()["statistics"], held)


def test_no_hook_is_left_when_the_memory_is_gone() -> None:
    hooks = torch_module._global_forward_hooks
    gc.collect()
    nn.Identity()(None)  # a hook that has nobody left to serve goes with the next call of a module
    before = len(hooks)
    model, memory, optimizer = learned()
    assert len(hooks) > before
    assert memory.tasks == 1
    del memory, optimizer
    gc.collect()
    statistics = statistics_of(model)
    model(inputs(1))
    assert len(hooks) == before
    assert moved(statistics, statistics_of(model)) == set(statistics)


def test_two_memories_of_one_model_do_not_disturb_each_other() -> None:
    model, _, _ = learned()
    attached, bystander = (GradientMemory(model, threshold=0.9) for _ in range(2))
    optimizer = SGD(model.parameters(), lr=0.05)
    attached.attach(optimizer)
    attached.update([inputs(0)])
    bystander.update([inputs(0)])
    before = statistics_of(model)
    model(inputs(1))
    assert_same(statistics_of(model), before)
