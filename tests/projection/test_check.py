"""Checks: leak and drift are zero after protected training and large after unprotected training."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from sgp import GradientMemory


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 32)
        self.second = nn.Linear(32, 30)
        self.out = nn.Linear(30, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(x)).tanh())


def make_inputs(seed: int, n: int = 24) -> Tensor:
    """Return inputs that span five of the twenty dimensions."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(5, 20, generator=generator)
    return torch.randn(n, 5, generator=generator) @ mixing


def train(model: nn.Module, optimizer: Optimizer, x: Tensor, steps: int = 30) -> None:
    target = torch.randn(len(x), 4, generator=torch.Generator().manual_seed(3))
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()


def make_blocking_memory(**settings: Any) -> GradientMemory:
    """Return a memory that blocks the span of the first task's inputs."""
    torch.manual_seed(0)
    memory = GradientMemory(Network(), threshold=1, alpha=math.inf, **settings)
    memory.update([make_inputs(0, n=16)])
    return memory


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "Adam": lambda p: Adam(p, lr=1e-2),
    "Adam, fused": lambda p: Adam(p, lr=1e-2, fused=True),
}


def test_without_training_nothing_has_leaked_or_drifted() -> None:
    memory = make_blocking_memory()
    result = memory.check(make_inputs(0))
    assert result.drift == 0
    assert result.leak == 0
    assert [layer.layer for layer in result.layers] == ["first", "second", "out"]
    assert all(layer.leak == layer.drift == 0 for layer in result.layers)


def test_captured_is_the_share_of_a_batch_in_the_bases() -> None:
    memory = make_blocking_memory()
    known, unknown = memory.check(make_inputs(0)), memory.check(make_inputs(7))
    assert known.layers[0].captured == pytest.approx(1, abs=1e-6)
    rows = torch.cat([make_inputs(7), torch.ones(24, 1)], dim=1).double()
    M = memory.subspaces["first"].basis[0].double()
    share = float((rows @ M).square().sum() / rows.square().sum())
    assert unknown.layers[0].captured == pytest.approx(share, abs=1e-9)
    assert share < 0.6


@pytest.mark.parametrize("new_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_protected_training_leaks_nothing_and_remembered_inputs_do_not_drift(
    new_optimizer: Callable[..., Optimizer],
) -> None:
    memory = make_blocking_memory()
    remembered = make_inputs(0, n=16)
    optimizer = new_optimizer(memory.model.parameters())
    memory.attach(optimizer)
    train(memory.model, optimizer, make_inputs(1))
    result = memory.check(remembered)
    assert result.leak < 1e-5
    assert result.drift < 1e-4
    assert all(layer.drift < 1e-4 for layer in result.layers)
    assert all(layer.captured == pytest.approx(1, abs=1e-6) for layer in result.layers)
    # The model has learned, as a batch of another task shows.
    other = memory.check(make_inputs(1))
    assert other.drift > 0.1
    assert other.leak == pytest.approx(result.leak)


@pytest.mark.parametrize("new_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_training_that_is_not_attached_leaks_and_drifts(new_optimizer: Callable[..., Optimizer]) -> None:
    memory = make_blocking_memory()
    train(memory.model, new_optimizer(memory.model.parameters()), make_inputs(1))
    result = memory.check(make_inputs(0, n=16))
    assert result.leak > 0.1
    assert result.drift > 0.1


def test_leak_and_drift_agree_with_their_definitions() -> None:
    memory = make_blocking_memory()
    model, batch = memory.model, make_inputs(2)
    old = copy.deepcopy(model)
    train(model, SGD(model.parameters(), lr=0.1), make_inputs(1), steps=3)
    result = memory.check(batch)
    model.requires_grad_(False)
    old.requires_grad_(False)
    new_out, old_out = model(batch), old(batch)
    assert result.drift == pytest.approx(float((new_out - old_out).norm() / old_out.norm()), rel=1e-4)
    first = result.layers[0]
    change = torch.cat(
        [
            model.get_parameter("first.weight") - old.get_parameter("first.weight"),
            (model.get_parameter("first.bias") - old.get_parameter("first.bias")).unsqueeze(1),
        ],
        dim=1,
    )
    M = memory.subspaces["first"].basis[0]
    assert first.leak == pytest.approx(float((change @ M).norm() / change.norm()), rel=1e-4)
    moved = model.get_submodule("first")(batch) - old.get_submodule("first")(batch)
    assert first.drift == pytest.approx(float(moved.norm() / old.get_submodule("first")(batch).norm()), rel=1e-3)


def test_changes_along_scaled_bases_are_no_leak() -> None:
    torch.manual_seed(0)
    memory = GradientMemory(Network(), threshold=1, alpha=1)
    memory.update([make_inputs(0, n=16)])
    optimizer = SGD(memory.model.parameters(), lr=0.1)
    memory.attach(optimizer)
    train(memory.model, optimizer, make_inputs(1))
    result = memory.check(make_inputs(0, n=16))
    assert result.leak < 1e-5
    assert result.drift > 1e-3


@pytest.mark.parametrize("anchor", [True, False])
def test_a_given_reference_replaces_the_anchor(anchor: bool) -> None:
    memory = make_blocking_memory(anchor=anchor)
    model = memory.model
    start = copy.deepcopy(model.state_dict())
    optimizer = SGD(model.parameters(), lr=0.1)
    train(model, optimizer, make_inputs(1), steps=5)
    middle = copy.deepcopy(model.state_dict())
    train(model, optimizer, make_inputs(1), steps=5)
    batch = make_inputs(0)
    since_middle = memory.check(batch, reference=middle).drift
    since_start = memory.check(batch, reference=start).drift
    assert 0 < since_middle < since_start
    assert memory.check(batch, reference=copy.deepcopy(model.state_dict())).drift == 0
    if anchor:
        assert memory.check(batch).drift == since_start


def test_without_an_anchor_a_reference_is_required() -> None:
    memory = make_blocking_memory(anchor=False)
    with pytest.raises(RuntimeError, match=r"anchor=False.*pass reference=, a state_dict of the model"):
        memory.check(make_inputs(0))


def test_a_check_before_the_first_update_is_refused() -> None:
    memory = GradientMemory(Network(), threshold=0.9)
    with pytest.raises(RuntimeError, match="nothing to check before the first update"):
        memory.check(make_inputs(0))


def test_a_reference_that_is_the_model_itself_is_refused() -> None:
    memory = make_blocking_memory()
    live = memory.model.state_dict()
    train(memory.model, SGD(memory.model.parameters(), lr=0.1), make_inputs(1), steps=2)
    with pytest.raises(ValueError, match=r"the model's own tensors.*copy.deepcopy\(model.state_dict\(\)\)"):
        memory.check(make_inputs(0), reference=live)


def test_a_reference_that_lacks_a_parameter_is_refused_by_name() -> None:
    memory = make_blocking_memory()
    partial = copy.deepcopy(memory.model.state_dict())
    del partial["second.weight"]
    with pytest.raises(ValueError, match=r"reference: 'second.weight' is missing"):
        memory.check(make_inputs(0), reference=partial)


class WithStatistics(Network):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(20)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(self.norm(x)))


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "fails"])
def test_a_check_leaves_no_trace_on_the_model(fails: bool) -> None:
    torch.manual_seed(0)
    model = WithStatistics()
    memory = GradientMemory(model, threshold=0.9, rest="free")
    memory.update([make_inputs(0)])
    train(model, SGD(model.parameters(), lr=0.1), make_inputs(1), steps=3)
    model.second.eval()
    before = copy.deepcopy(model.state_dict())
    flags = [module.training for module in model.modules()]
    state = copy.deepcopy(memory.state_dict())
    random = torch.get_rng_state()
    pointers = [p.data_ptr() for p in model.parameters()]
    calls = 0

    def forward(batch: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        # The third call runs with the reference weights, after the Gram matrices and the current outputs.
        if fails and calls == 3:
            assert not torch.equal(model.first.weight, before["first.weight"])
            raise RuntimeError("a batch too many")
        return model(batch)

    if fails:
        with pytest.raises(RuntimeError, match="a batch too many"):
            memory.check(make_inputs(0), forward=forward)
    else:
        assert memory.check(make_inputs(0), forward=forward).drift > 0
    assert calls == 3
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert [module.training for module in model.modules()] == flags
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert torch.equal(torch.get_rng_state(), random)
    assert str(memory.state_dict()) == str(state)


class Pair(NamedTuple):
    logits: Tensor
    hidden: Tensor


@dataclass
class Record:
    logits: Tensor


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda y: (y, y),
    "named tuple": lambda y: Pair(y, y),
    "dict": lambda y: {"logits": y, "classes": y.argmax(1), "nothing": None},
    "nested": lambda y: [{"a": (y, "text")}, 3],
}


@pytest.mark.parametrize("wrap", OUTPUTS.values(), ids=OUTPUTS.keys())
def test_outputs_may_be_tuples_and_dicts(wrap: Callable[[Tensor], Any]) -> None:
    class Wrapped(Network):
        def forward(self, x: Tensor) -> Any:
            return wrap(super().forward(x))

    results = []
    for kind in (Network, Wrapped):
        torch.manual_seed(0)
        model = kind()
        memory = GradientMemory(model, threshold=0.9)
        memory.update([make_inputs(0)])
        with torch.no_grad():
            model.out.weight.mul_(1.1)
        results.append(memory.check(make_inputs(0)).drift)
    assert results[0] > 0.01
    assert results[1] == pytest.approx(results[0], rel=1e-6)


@pytest.mark.parametrize("output", [Record(torch.ones(2)), None, torch.ones(2, dtype=torch.int64), ()])
def test_outputs_without_floating_point_tensors_are_refused(output: Any) -> None:
    class Strange(Network):
        def forward(self, x: Tensor) -> Any:
            super().forward(x)
            return output

    memory = GradientMemory(Strange(), threshold=0.9)
    memory.update([make_inputs(0)])
    with pytest.raises(TypeError, match="has no floating point tensor to compare: pass a forward="):
        memory.check(make_inputs(0))
    assert memory.check(make_inputs(0), forward=lambda x: (memory.model(x), x)[1]).drift == 0


def test_every_form_of_batch_is_accepted() -> None:
    memory = make_blocking_memory()
    x = make_inputs(0)
    with torch.no_grad():
        memory.model.get_parameter("out.weight").mul_(1.1)
    expected = memory.check(x).drift
    assert expected > 0
    assert memory.check((x, torch.zeros(24))).drift == expected
    assert memory.check({"x": x}).drift == expected
    assert memory.check([["a", x]], forward=lambda batch: memory.model(batch[0][1])).drift == expected


def test_layers_that_the_batch_does_not_reach_are_omitted() -> None:
    memory = make_blocking_memory()
    result = memory.check(make_inputs(0), forward=lambda x: memory.model.get_submodule("first")(x))
    assert [layer.layer for layer in result.layers] == ["first"]


def test_masked_positions_do_not_count() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4, bias=False))
    memory = GradientMemory(model, threshold=1.0, alpha=math.inf)
    texts = torch.randn(2, 3, 6)
    seen = torch.tensor([[True, True, False], [True, False, False]])
    memory.update([texts], mask=lambda _: seen)
    with torch.no_grad():
        model[0].weight += memory.project(torch.randn(4, 6), "0")
    hidden, whole = memory.check(texts, mask=lambda _: seen), memory.check(texts)
    assert hidden.layers[0].captured == pytest.approx(1.0)
    assert hidden.layers[0].drift < 1e-5
    assert whole.layers[0].captured < 0.95
    assert whole.layers[0].drift > 0.1
    assert hidden.drift == whole.drift


def test_convolutions_and_frozen_biases_are_measured_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))
    memory = GradientMemory(model, threshold=1, alpha=math.inf, bias="freeze")
    batch = torch.randn(2, 4, 6, 6)
    batch = batch[:, :, :1, :1].expand(2, 4, 6, 6)  # the same patch everywhere: one basis per sample and group
    memory.update([batch])
    optimizer = Adam(model.parameters(), lr=1e-2)
    memory.attach(optimizer)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(4, 4, 6, 6)).square().mean().backward()
        optimizer.step()
    result = memory.check(batch)
    assert [layer.layer for layer in result.layers] == ["0", "3"]
    assert result.leak < 1e-5
    assert result.drift < 1e-4
    assert memory.check(torch.randn(2, 4, 6, 6)).drift > 0.01


def test_a_check_prints_as_a_table_with_aligned_columns() -> None:
    memory = make_blocking_memory()
    lines = str(memory.check(make_inputs(0))).splitlines()
    assert lines[0] == "outputs drifted by 0.00e+00"
    assert lines[1].split() == ["layer", "captured", "leak", "drift"]
    assert [line.split()[0] for line in lines[2:]] == ["first", "second", "out"]
    assert len({len(line) for line in lines[1:]}) == 1
    wide = nn.ModuleDict({"a" * 50: nn.Linear(3, 2)})
    memory = GradientMemory(wide, threshold=0.9)
    memory.update([torch.randn(9, 3)], forward=lambda x: wide["a" * 50](x))
    lines = str(memory.check(torch.randn(9, 3), forward=lambda x: wide["a" * 50](x))).splitlines()
    assert len({len(line) for line in lines[1:]}) == 1
