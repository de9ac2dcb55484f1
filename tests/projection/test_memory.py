"""The interface of ``GradientMemory``, and its errors for wrong use."""

import copy
import gc
import io
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from sgp import GradientMemory
from sgp.projection.modes import Mode


class MLP(nn.Module):
    """A small network, at module level so that it can be pickled."""

    def __init__(self, inputs: int = 8, width: int = 40, outputs: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.second = nn.Linear(width, width)
        self.out = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(x).relu()).relu())


class Heads(nn.Module):
    """A trunk, and one head per task that is added with the task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 12)
        self.heads = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        return self.heads[-1](self.trunk(x).relu())


def make_model(seed: int = 0) -> MLP:
    torch.manual_seed(seed)
    return MLP()


def make_batches(task: int, *, n: int = 60, inputs: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return inputs with a decaying spectrum, which differ between tasks."""
    generator = torch.Generator().manual_seed(task)
    mixing = torch.randn(inputs, inputs, generator=generator) * torch.linspace(1, 0.02, inputs)
    return list((torch.randn(n, inputs, generator=generator) @ mixing).to(dtype).split(20))


def take_step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).float().square().mean().backward()
    optimizer.step()


def make_learned_memory(**settings: Any) -> GradientMemory:
    """Return a memory after one task."""
    settings = {"threshold": 0.8, "alpha": 10} | settings
    memory = GradientMemory(make_model(), **settings)
    memory.update(make_batches(0))
    return memory


def get_contents(memory: GradientMemory) -> dict[str, Any]:
    """Return the state of a memory without its settings."""
    return {name: value for name, value in memory.state_dict().items() if name != "settings"}


def get_ranks(memory: GradientMemory) -> dict[str, int]:
    return {name: int(subspace.rank.sum()) for name, subspace in memory.subspaces.items()}


def assert_same(a: Any, b: Any) -> None:
    """Assert that nested dicts, lists and tensors are equal to the bit."""
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def copy_state(memory: GradientMemory) -> dict[str, Any]:
    """Return copies of all that a failed update must not change: memory, model, flags and random state."""
    return copy.deepcopy(
        {
            "memory": memory.state_dict(),
            "model": dict(memory.model.state_dict()),
            "training": [module.training for module in memory.model.modules()],
            "hooks": [len(module._forward_pre_hooks) for module in memory.model.modules()],
            "random": torch.get_rng_state(),
        }
    )


# Invalid settings


@pytest.mark.parametrize("value", [0, 0.0, -0.5, 1.0001, 97, math.nan, math.inf, "0.9", None])
@pytest.mark.parametrize("form", [lambda v: v, lambda v: {"first": 0.9, "*": v}], ids=["number", "dict"])
def test_a_threshold_outside_zero_to_one_is_refused_at_construction(form: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(ValueError, match=r"threshold must be in \(0, 1\], got"):
        GradientMemory(make_model(), threshold=form(value))


@pytest.mark.parametrize("value", [0, 1.5, math.nan, None])
@pytest.mark.parametrize("form", [lambda f: f, lambda f: {"first": 0.9, "*": f}], ids=["function", "dict of functions"])
def test_a_function_that_returns_an_invalid_threshold_is_refused_and_names_the_layer(
    form: Callable[[Any], Any], value: Any
) -> None:
    memory = GradientMemory(make_model(), threshold=form(lambda task: 0.9 if task == 0 else value))
    memory.update(make_batches(0))
    before = copy_state(memory)
    with pytest.raises(ValueError, match=r"threshold of layer '(first|second)' must be in \(0, 1\], got"):
        memory.update(make_batches(1))
    assert_same(copy_state(memory), before)


def test_a_threshold_of_one_is_the_largest_that_is_accepted() -> None:
    assert GradientMemory(make_model(), threshold=1).threshold == 1


@pytest.mark.parametrize("alpha", [-1, -0.001, math.nan, -math.inf, "10", None])
def test_an_invalid_alpha_is_refused(alpha: Any) -> None:
    with pytest.raises(ValueError, match=r"alpha must be a number of at least 0, or math.inf for GPM; got"):
        GradientMemory(make_model(), threshold=0.9, alpha=alpha)


@pytest.mark.parametrize(
    ("setting", "choices"),
    [("preset", "'paper', 'reference'"), ("bias", "'protect', 'freeze'"), ("rest", "'freeze', 'free'")],
)
def test_an_unknown_choice_is_refused_and_lists_the_valid_ones(setting: str, choices: str) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be one of .*{choices}; got 'nonsense'"):
        GradientMemory(make_model(), threshold=0.9, **{setting: "nonsense"})


def test_an_unknown_mode_is_refused_and_the_optimizer_stays_as_it_is() -> None:
    memory = make_learned_memory()
    optimizer = SGD(memory.model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="mode must be one of 'auto', 'step', 'gradient', 'input'; got 'short'"):
        memory.attach(optimizer, mode="short")  # type: ignore[arg-type]
    assert not optimizer._optimizer_step_pre_hooks


def test_exclude_as_a_string_is_refused_and_suggests_a_list() -> None:
    with pytest.raises(TypeError, match=r"exclude must be a list of patterns: \['out'\]"):
        GradientMemory(make_model(), threshold=0.9, exclude="out")


@pytest.mark.parametrize("pattern", ["heads.*", "Out", "first.weights", "*.running_mean"])
def test_a_pattern_that_matches_nothing_is_refused_and_lists_the_names(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"exclude: the pattern .* matches no module or parameter") as error:
        GradientMemory(make_model(), threshold=0.9, exclude=["out", pattern])
    assert repr(pattern) in str(error.value)
    assert "first, out, second" in str(error.value)
    with pytest.raises(ValueError, match="threshold: the pattern"):
        GradientMemory(make_model(), threshold={pattern: 0.9, "*": 0.9})
    memory = make_learned_memory()
    before = copy_state(memory)
    with pytest.raises(ValueError, match="samples: the pattern"):
        memory.update(make_batches(1), samples={pattern: 10})
    assert_same(copy_state(memory), before)


def test_a_pattern_for_heads_that_are_added_later_is_accepted() -> None:
    memory = GradientMemory(Heads(), threshold=0.9, exclude=["heads.*"])
    assert list(memory.capacity().free) == []
    with pytest.raises(ValueError, match="matches no module"):
        GradientMemory(Heads(), threshold=0.9, exclude=["head.*"])


def test_a_layer_without_a_threshold_is_refused_by_name_at_construction() -> None:
    with pytest.raises(ValueError, match="threshold: no pattern matches the layer 'out'; add one, such as"):
        GradientMemory(make_model(), threshold={"first": 0.9, "second": 0.8})


def test_a_layer_that_is_unfrozen_between_updates_stays_frozen_and_is_named() -> None:
    model = make_model()
    model.first.requires_grad_(False)
    memory = GradientMemory(model, threshold=0.9)
    memory.update(make_batches(0))
    model.first.requires_grad_(True)
    before = model.first.weight.clone()
    optimizer = SGD(model.parameters(), lr=0.1)
    memory.attach(optimizer)
    model(make_batches(1)[0]).square().sum().backward()
    with pytest.warns(UserWarning, match=r"first\.weight, first\.bias had requires_grad=False"):
        optimizer.step()
    assert torch.equal(model.first.weight, before)


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3)), nn.Module(), nn.Linear(3, 2).requires_grad_(False)],
    ids=["no layer", "nothing", "not trained"],
)
def test_a_model_with_no_layer_to_protect_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="the model has no layer to protect"):
        GradientMemory(model, threshold=0.9)


def test_a_model_whose_layers_are_all_excluded_is_refused() -> None:
    with pytest.raises(ValueError, match="no layer to protect: every layer is excluded"):
        GradientMemory(make_model(), threshold=0.9, exclude=["*"])


def test_a_model_that_is_not_a_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not list"):
        GradientMemory([nn.Linear(2, 2)], threshold=0.9)  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", [None, nn.Linear(2, 2), "sgd", SGD], ids=["None", "module", "name", "class"])
def test_an_object_that_is_not_an_optimizer_is_refused(optimizer: Any) -> None:
    with pytest.raises(TypeError, match=r"attach takes a torch.optim.Optimizer, not"):
        make_learned_memory().attach(optimizer)


def test_an_optimizer_of_another_model_is_refused_and_stays_as_it_is() -> None:
    memory = make_learned_memory()
    for other in (SGD(make_model().parameters(), lr=0.1), Adam(copy.deepcopy(memory.model).parameters())):
        with pytest.raises(ValueError, match="the optimizer holds none of the model's parameters"):
            memory.attach(other)
        assert not other._optimizer_step_pre_hooks
        assert not other._optimizer_step_post_hooks


# Invalid data


@pytest.mark.parametrize("loader", [[], iter(()), torch.utils.data.DataLoader([])], ids=["list", "iterator", "loader"])
def test_an_empty_loader_is_refused_and_changes_nothing(loader: Any) -> None:
    memory = make_learned_memory()
    before = copy_state(memory)
    with pytest.raises(ValueError, match="the loader gave no batch"):
        memory.update(loader)
    assert_same(copy_state(memory), before)


@pytest.mark.parametrize("samples", [0, -3, {"second": 0}, {"out": 5, "*": -1}])
def test_samples_below_one_are_refused_and_name_the_layer(samples: Any) -> None:
    memory = make_learned_memory()
    before = copy_state(memory)
    with pytest.raises(ValueError, match=r"samples of layer '(first|second)' must be at least 1, got"):
        memory.update(make_batches(1), samples=samples)
    assert_same(copy_state(memory), before)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_representation_that_is_not_finite_names_the_layer_and_changes_nothing(value: float) -> None:
    memory = make_learned_memory()
    inputs = torch.cat(make_batches(1))
    inputs[17, 3] = value
    before = copy_state(memory)
    with pytest.raises(FloatingPointError, match="layer 'first': its input holds NaN or an infinity"):
        memory.update([make_batches(2)[0], inputs])
    assert_same(copy_state(memory), before)

    class Overflows(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.second(self.first(x)) * math.inf)

    inner = GradientMemory(Overflows(), threshold=0.9)
    with pytest.raises(FloatingPointError, match="layer 'out'"):
        inner.update(make_batches(0))
    assert inner.tasks == 0
    assert inner.subspaces == {}


def test_a_batch_of_an_unknown_type_is_refused_and_lists_the_valid_types() -> None:
    memory = make_learned_memory()
    before = copy_state(memory)
    with pytest.raises(ValueError, match="a batch of type str is not understood: give tensors, tuples"):
        memory.update(["text"])
    assert_same(copy_state(memory), before)


def test_batches_that_do_not_run_through_the_model_are_refused() -> None:
    memory = make_learned_memory()
    before = copy_state(memory)
    with pytest.raises(ValueError, match="none of the protected layers saw an input"):
        memory.update(make_batches(1), forward=lambda batch: batch.sum())
    assert_same(copy_state(memory), before)


def test_an_update_that_fails_in_the_middle_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = make_learned_memory()
    memory.model.train()
    memory.model.second.eval()
    assert isinstance(memory.model, MLP)
    before = copy_state(memory)

    def broken_off() -> Iterator[Tensor]:
        yield from make_batches(1)
        torch.rand(3)
        raise OSError("the disk is gone")

    class Loader:
        def __iter__(self) -> Iterator[Tensor]:
            return broken_off()

    with pytest.raises(OSError, match="the disk is gone"):
        memory.update(Loader())
    assert_same(copy_state(memory), before)

    calls: list[Any] = []
    original = type(memory.subspaces["first"]).grow

    def fails_at_the_third_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        if len(calls) == 3:
            raise RuntimeError("the decomposition did not converge")
        return original(self, *args, **kwargs)

    for budget in (2**30, 1000):  # all layers in one pass over the data, or one pass for each
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(type(memory.subspaces["first"]), "grow", fails_at_the_third_layer)
            with pytest.raises(RuntimeError, match="did not converge"):
                memory.update(make_batches(1), budget=budget)
        assert len(calls) == 3
        assert_same(copy_state(memory), before)

    with pytest.raises((RuntimeError, ValueError), match="shape"):
        memory.update([make_batches(1)[0], torch.ones(4, 9)])
    assert_same(copy_state(memory), before)
    memory.update(make_batches(1))
    assert memory.tasks == 2


def test_an_iterator_is_refused_where_two_passes_are_needed() -> None:
    memory = make_learned_memory()
    before = copy_state(memory)
    with pytest.raises(ValueError, match=r"take 3 passes over the data and an iterator gives one: .* budget="):
        memory.update(iter(make_batches(1)), budget=1000)
    assert_same(copy_state(memory), before)
    several = copy.deepcopy(make_learned_memory())
    several.update(make_batches(1), budget=1000)
    memory.update(iter(make_batches(1)))
    assert_same(several.state_dict()["subspaces"], memory.state_dict()["subspaces"])


def test_an_all_zero_representation_adds_no_basis() -> None:
    model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.ReLU(), nn.Linear(6, 2, bias=False))
    memory = GradientMemory(model, threshold=0.9, alpha=10)
    zeros = [torch.zeros(20, 8)]
    memory.update(zeros)
    assert get_ranks(memory) == {"0": 0, "2": 0}
    assert memory.tasks == 1
    optimizer = Adam(model.parameters(), lr=0.1)
    memory.attach(optimizer)
    before = copy.deepcopy(model.state_dict())
    take_step(model, optimizer, make_batches(0)[0])
    assert not torch.equal(model[0].weight, before["0.weight"])
    memory.update(make_batches(0))
    stored = copy.deepcopy(memory.state_dict()["subspaces"])
    assert min(get_ranks(memory).values()) > 0
    memory.update(zeros)
    assert_same(memory.state_dict()["subspaces"], stored)
    take_step(model, optimizer, make_batches(1)[0])
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    memory.summary()
    memory.check(zeros[0])


def test_zero_inputs_still_protect_the_bias() -> None:
    memory = GradientMemory(nn.Linear(5, 2), threshold=0.9)
    memory.update([torch.zeros(10, 5)])
    (subspace,) = memory.subspaces.values()
    assert int(subspace.rank) == 1
    assert subspace.basis.abs().flatten().tolist() == [0, 0, 0, 0, 0, 1]


# Valid settings


def test_threshold_may_be_a_function_of_the_task() -> None:
    seen: list[int] = []

    def rising(task: int) -> float:
        seen.append(task)
        return 0.6 + 0.35 * task

    memory = GradientMemory(make_model(), threshold=rising, alpha=math.inf)
    low = GradientMemory(make_model(), threshold=0.6, alpha=math.inf)
    high = GradientMemory(make_model(), threshold=0.95, alpha=math.inf)
    for task in range(2):
        for each in (memory, low, high):
            each.update(make_batches(task))
        if task == 0:
            assert_same(get_contents(memory), get_contents(low))
    assert sorted(set(seen)) == [0, 1]
    assert get_ranks(low)["first"] < get_ranks(memory)["first"] <= get_ranks(high)["first"]


def test_threshold_may_differ_per_layer_and_the_first_matching_pattern_applies() -> None:
    single = {value: make_learned_memory(threshold=value).subspaces for value in (0.5, 0.8, 0.99)}
    mixed = make_learned_memory(threshold={"first": lambda task: 0.99, "[sf]*": 0.5, "*": 0.8}).subspaces
    for name, value in (("first", 0.99), ("second", 0.5), ("out", 0.8)):
        assert torch.equal(mixed[name].basis, single[value][name].basis)
    assert single[0.5]["first"].rank < single[0.99]["first"].rank


def test_samples_may_differ_per_layer() -> None:
    data = make_batches(0)
    whole, few = make_learned_memory(), GradientMemory(make_model(), threshold=0.8)
    few.update([data[0][:7]])
    mixed = GradientMemory(make_model(), threshold=0.8)
    mixed.update(data, samples={"second": 7})
    assert torch.equal(mixed.subspaces["second"].basis, few.subspaces["second"].basis)
    assert torch.equal(mixed.subspaces["first"].basis, whole.subspaces["first"].basis)


def test_samples_of_a_loader_that_does_not_shuffle_give_a_warning() -> None:
    data = torch.utils.data.TensorDataset(torch.cat(make_batches(1)))
    memory = make_learned_memory()
    with pytest.warns(UserWarning, match="does not shuffle"):
        memory.update(torch.utils.data.DataLoader(data, batch_size=10), samples=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory.update(torch.utils.data.DataLoader(data, batch_size=10, shuffle=True), samples=20)
        memory.update(torch.utils.data.DataLoader(data, batch_size=10))


def test_every_form_of_batch_gives_the_same_memory() -> None:
    class Keywords(MLP):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(x)

    def memory() -> GradientMemory:
        torch.manual_seed(0)
        return GradientMemory(Keywords(), threshold=0.8)

    data = make_batches(0)
    plain, named, pairs, own = (memory() for _ in range(4))
    plain.update(data)
    named.update([{"x": x, "scale": torch.ones(1)} for x in data])
    pairs.update((x, torch.zeros(len(x))) for x in data)
    own.update([[["nested", x]] for x in data], forward=lambda batch: own.model(batch[0][1]))
    for each in (named, pairs, own):
        assert_same(each.state_dict(), plain.state_dict())


def test_alpha_zero_is_accepted_and_scales_by_the_singular_values() -> None:
    memory, stronger = make_learned_memory(alpha=0), make_learned_memory(alpha=10)
    for name, subspace in memory.subspaces.items():
        assert torch.equal(subspace.basis, stronger.subspaces[name].basis)
        assert (subspace.importance <= stronger.subspaces[name].importance).all()
        assert float(subspace.importance[0, 0]) == 1  # Eq. 2 at alpha = 0 is sigma / sigma_max
    rows = torch.cat(make_batches(0)).double()
    rows = torch.cat([rows, torch.ones(len(rows), 1)], dim=1)
    sigma = torch.linalg.svdvals(rows)
    first = memory.subspaces["first"].importance[0].double()
    torch.testing.assert_close(first, sigma[: len(first)] / sigma[0], atol=1e-5, rtol=0)


def test_alpha_infinite_gives_importance_one_exactly_and_the_same_bases() -> None:
    for task in range(3):
        if task == 0:
            gpm, finite = make_learned_memory(alpha=math.inf), make_learned_memory(alpha=1e-3)
        else:
            gpm.update(make_batches(task))
            finite.update(make_batches(task))
        for name, subspace in gpm.subspaces.items():
            assert (subspace.importance == 1).all()
            assert torch.equal(subspace.basis, finite.subspaces[name].basis)
            assert subspace.importance.numel() > 1
    assert any((s.importance < 1).any() for s in finite.subspaces.values())


def test_the_preset_reference_has_one_basis_less_in_the_first_task_and_frozen_biases() -> None:
    paper = make_learned_memory(bias="freeze")
    reference = make_learned_memory(preset="reference")
    assert get_ranks(reference) == {name: rank - 1 for name, rank in get_ranks(paper).items()}
    assert set(reference.capacity().frozen) == {"first.bias", "second.bias", "out.bias"}
    assert make_learned_memory(preset="paper").capacity().frozen == {}
    assert_same(make_learned_memory(preset="paper").state_dict(), make_learned_memory().state_dict())
    optimizer = SGD(reference.model.parameters(), lr=0.1)
    reference.attach(optimizer)
    before = copy.deepcopy(reference.model.state_dict())
    take_step(reference.model, optimizer, make_batches(1)[0])
    for name, value in reference.model.state_dict().items():
        assert torch.equal(value, before[name]) == name.endswith("bias"), name


def test_a_given_bias_rule_overrides_the_preset() -> None:
    assert make_learned_memory(preset="reference", bias="protect").capacity().frozen == {}


# Attaching


def project_once(memory: GradientMemory, before: dict[str, Tensor], gradients: dict[str, Tensor], rate: float) -> None:
    """Return the change of each layer by its gradient, projected exactly once."""
    for name, subspace in memory.subspaces.items():
        joint = torch.cat([gradients[f"{name}.weight"], gradients[f"{name}.bias"].unsqueeze(1)], dim=1)
        M, lam = subspace.basis[0], subspace.importance[0]
        expected = -rate * (joint - joint @ (M * lam) @ M.T)
        module = memory.model.get_submodule(name)
        weight = module.get_parameter("weight") - before[f"{name}.weight"]
        bias = module.get_parameter("bias") - before[f"{name}.bias"]
        found = torch.cat([weight, bias.unsqueeze(1)], dim=1)
        torch.testing.assert_close(found, expected, atol=2e-7, rtol=1e-3)
        assert (joint @ (M * lam) @ M.T).norm() > 0.1 * joint.norm()


@pytest.mark.parametrize("mode", ["auto", "step", "gradient", "input"])
def test_attaching_twice_projects_once(mode: Mode) -> None:
    memory = make_learned_memory(alpha=1)  # with importances below 1 a second projection would be visible
    model = memory.model
    optimizer = SGD(model.parameters(), lr=0.1)
    hooks = [memory.attach(optimizer, mode=mode) for _ in range(3)]
    assert [hook.is_attached for hook in hooks] == [False, False, True]
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    for x in torch.cat(make_batches(1)).split(15):
        raw = copy.deepcopy(model)
        raw(x).square().mean().backward()
        gradients = {name: p.grad.clone() for name, p in raw.named_parameters() if p.grad is not None}
        before = copy.deepcopy(model.state_dict())
        take_step(model, optimizer, x)
        project_once(memory, before, gradients, 0.1)


def test_a_new_optimizer_can_be_attached_for_each_task_and_the_old_one_is_not_kept_alive() -> None:
    memory = GradientMemory(make_model(), threshold=0.8, alpha=math.inf)
    old: list[weakref.ref[Optimizer]] = []
    for task in range(3):
        optimizer = SGD(memory.model.parameters(), lr=0.05, momentum=0.9)
        hook = memory.attach(optimizer)
        for x in make_batches(task):
            take_step(memory.model, optimizer, x)
        memory.update(make_batches(task))
        assert hook.is_attached
        old.append(weakref.ref(optimizer))
        del optimizer
        gc.collect()
        assert old[-1]() is None
        assert not hook.is_attached
    assert memory.tasks == 3


def test_a_memory_and_its_model_are_not_kept_alive() -> None:
    model = nn.Sequential(nn.Linear(8, 40), nn.BatchNorm1d(40), nn.Linear(40, 4))
    memory = GradientMemory(model, threshold=0.8)
    memory.update(make_batches(0))
    optimizer = SGD(model.parameters(), lr=0.05)
    memory.attach(optimizer)
    for x in make_batches(1):
        take_step(model, optimizer, x)
    gone = [weakref.ref(model), weakref.ref(memory)]
    del model, memory, optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


@pytest.mark.parametrize("mode", ["auto", "step"])
def test_before_the_first_update_steps_are_those_of_the_optimizer(mode: Any) -> None:
    model, clone = make_model(), make_model()
    memory = GradientMemory(model, threshold=0.9)
    optimizer, plain = SGD(model.parameters(), lr=0.1, momentum=0.9), SGD(clone.parameters(), lr=0.1, momentum=0.9)
    memory.attach(optimizer, mode=mode)
    for x in make_batches(0):
        take_step(model, optimizer, x)
        take_step(clone, plain, x)
    assert_same(dict(model.state_dict()), dict(clone.state_dict()))


# Training without projection


@pytest.mark.parametrize("new_optimizer", [SGD, Adam])
def test_weights_trained_by_an_unattached_optimizer_are_refused_at_the_next_update(new_optimizer: Any) -> None:
    memory = make_learned_memory()
    optimizer = new_optimizer(memory.model.parameters(), lr=0.01)
    take_step(memory.model, optimizer, make_batches(1)[0])
    before = copy_state(memory)
    with pytest.raises(RuntimeError, match="layer 'first' was trained by an optimizer that is not attached"):
        memory.update(make_batches(1))
    assert_same(copy_state(memory), before)
    memory.update(make_batches(1), allow_unattached=True)
    assert memory.tasks == 2
    memory.update(make_batches(2))  # nothing has changed since


def test_the_error_names_the_layer_that_was_trained_unattached() -> None:
    memory = make_learned_memory()
    model = memory.model
    assert isinstance(model, MLP)
    attached = SGD([*model.first.parameters(), *model.second.parameters()], lr=0.1)
    memory.attach(attached)
    free = SGD(model.out.parameters(), lr=0.1)
    model(make_batches(1)[0]).square().mean().backward()
    attached.step()
    free.step()
    with pytest.raises(RuntimeError, match="layer 'out' was trained"):
        memory.update(make_batches(1))
    memory.update(make_batches(1), allow_unattached=True)
    memory.attach(free)
    model(make_batches(1)[0]).square().mean().backward()
    attached.step()
    free.step()
    memory.update(make_batches(1))


def test_one_changed_bit_of_a_weight_is_detected() -> None:
    memory = make_learned_memory()
    weight = memory.model.get_parameter("second.weight")
    with torch.no_grad():
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0))
    with pytest.raises(RuntimeError, match="layer 'second'"):
        memory.update(make_batches(1))


def test_changes_of_excluded_layers_are_accepted() -> None:
    memory = make_learned_memory(exclude=["out"])
    with torch.no_grad():
        memory.model.get_parameter("out.weight").add_(1)
    memory.update(make_batches(1))
    assert memory.tasks == 2


# Models that change


def test_a_head_that_is_added_later_is_scanned_and_protected_from_the_next_update() -> None:
    model = Heads()
    memory = GradientMemory(model, threshold=0.8, alpha=math.inf)
    optimizer = SGD(model.parameters(), lr=0.1)
    memory.attach(optimizer)
    for task in range(3):
        model.heads.append(nn.Linear(12, 2))
        optimizer.add_param_group({"params": list(model.heads[-1].parameters())})
        before = copy.deepcopy(model.heads[-1].state_dict())
        for x in make_batches(task):
            take_step(model, optimizer, x)
        assert not torch.equal(model.heads[-1].weight, before["weight"])
        if task:
            with pytest.warns(UserWarning, match="no input reached heads.0"):
                memory.update(make_batches(task))
        else:
            memory.update(make_batches(task))
        assert set(memory.subspaces) == {"trunk", *(f"heads.{i}" for i in range(task + 1))}
    # The first head keeps its bases in later tasks.
    assert get_ranks(memory)["heads.0"] > 0
    assert len(memory.capacity().layers) == 4


def test_excluded_heads_are_free_whenever_they_are_added() -> None:
    model = Heads()
    memory = GradientMemory(model, threshold=0.8, exclude=["heads.*"])
    for task in range(2):
        model.heads.append(nn.Linear(12, 2))
        memory.update(make_batches(task))
    assert set(memory.subspaces) == {"trunk"}
    assert memory.capacity().free == {
        f"heads.{i}.{leaf}": "excluded by 'heads.*'" for i in range(2) for leaf in ("weight", "bias")
    }


def test_a_layer_that_no_input_reached_gives_a_warning() -> None:
    class Half(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x)

    memory = GradientMemory(Half(), threshold=0.9)
    with pytest.warns(UserWarning, match="no input reached second, out in this update"):
        memory.update(make_batches(0))
    assert set(memory.subspaces) == {"first"}
    layers = {layer.layer: layer for layer in memory.capacity().layers}
    assert layers["out"].bases == 0
    assert layers["out"].free == 1


def test_a_layer_that_is_temporarily_not_trained_keeps_its_bases() -> None:
    memory = make_learned_memory(alpha=math.inf)
    first = memory.model.get_submodule("first")
    stored = memory.subspaces["first"].basis[0]
    first.requires_grad_(False)
    memory.update(make_batches(0))
    first.requires_grad_(True)
    memory.update(make_batches(1))
    now = memory.subspaces["first"].basis[0]
    assert 0 < stored.shape[1] < now.shape[0]
    torch.testing.assert_close(now @ (now.T @ stored), stored, atol=1e-5, rtol=0)


def test_a_layer_of_another_shape_under_the_same_name_is_refused() -> None:
    memory = make_learned_memory()
    model = memory.model
    model.first, model.second = nn.Linear(8, 30), nn.Linear(30, 40)
    before = copy_state(memory)
    message = r"layer 'second' has changed .*: its inputs have 1 x 31 .*, its bases 1 x 41.* a new GradientMemory"
    with pytest.raises(ValueError, match=message):
        memory.attach(SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=message):
        memory.update(make_batches(1), allow_unattached=True)
    assert_same(copy_state(memory), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "new_optimizer", [lambda p: SGD(p, lr=0.05), lambda p: AdamW(p, lr=1e-3, eps=1e-4)], ids=["SGD", "AdamW"]
)
def test_sixteen_bit_models_work_and_the_memory_keeps_its_own_precision(
    new_optimizer: Callable[..., Optimizer], dtype: torch.dtype
) -> None:
    def leak(*, keep_master: bool) -> float:
        model = make_model().to(dtype)
        memory = GradientMemory(model, threshold=0.8, alpha=math.inf)
        optimizer = new_optimizer(model.parameters())
        with pytest.warns(UserWarning, match="16-bit weights: the hook keeps float32 masters"):
            hook = memory.attach(optimizer)
        data = make_batches(0, dtype=dtype)
        for x in data:
            take_step(model, optimizer, x)
        memory.update(data)
        for subspace in memory.subspaces.values():
            assert subspace.basis.dtype == torch.float32
            M = subspace.basis[0].double()
            assert (M.T @ M - torch.eye(M.shape[1])).abs().max() < 1e-6
        for x in make_batches(1, dtype=dtype) * 10:
            take_step(model, optimizer, x)
            if not keep_master:
                hook.load_state_dict({"steps": 0, "masters": {}})
        result = memory.check(data[0])
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert all(0 < layer.drift < 1 for layer in result.layers)
        memory.update(make_batches(1, dtype=dtype))
        assert memory.tasks == 2
        return result.leak

    assert leak(keep_master=True) < 0.5 * leak(keep_master=False)


@pytest.mark.parametrize("when", ["before steps", "after steps"])
@pytest.mark.parametrize("new_optimizer", [lambda p: SGD(p, lr=0.1), lambda p: Adam(p, lr=1e-2)], ids=["SGD", "Adam"])
def test_a_model_may_change_its_dtype_after_an_update(new_optimizer: Callable[..., Optimizer], when: str) -> None:
    memory = make_learned_memory(alpha=math.inf)
    model = memory.model
    if when == "after steps":
        optimizer = new_optimizer(model.parameters())
        memory.attach(optimizer)
        for x in make_batches(1):
            take_step(model, optimizer, x)
        memory.update(make_batches(1))
    model.double()
    data = make_batches(2, dtype=torch.float64)
    optimizer = new_optimizer(model.parameters())
    memory.attach(optimizer)
    for x in data:
        take_step(model, optimizer, x)
    result = memory.check(make_batches(0, dtype=torch.float64)[0])
    assert result.drift > 0
    assert result.leak < 1e-5
    memory.update(data)
    assert {subspace.basis.dtype for subspace in memory.subspaces.values()} == {torch.float32}


def test_a_change_of_dtype_alone_does_not_count_as_training() -> None:
    memory = make_learned_memory()
    memory.model.double()
    memory.update(make_batches(1, dtype=torch.float64))
    memory.model.float()
    memory.update(make_batches(2))
    assert memory.tasks == 3
    with torch.no_grad():
        memory.model.get_parameter("first.weight")[0, 0] += 1e-3
    memory.model.double()
    with pytest.raises(RuntimeError, match="layer 'first' was trained"):
        memory.update(make_batches(3, dtype=torch.float64))


def test_momentum_may_have_another_dtype_than_the_weights() -> None:
    memory = make_learned_memory()
    optimizer = SGD(memory.model.parameters(), lr=0.1, momentum=0.9)
    memory.attach(optimizer)
    take_step(memory.model, optimizer, make_batches(1)[0])
    memory.model.double()
    memory.update(make_batches(1, dtype=torch.float64))
    memory.attach(optimizer)
    take_step(memory.model, optimizer, make_batches(2, dtype=torch.float64)[0])


# No trace on the model


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks:UserWarning")
def test_a_compiled_model_is_protected_like_the_module_inside() -> None:
    memory = make_learned_memory(alpha=math.inf)
    torch._dynamo.reset()
    model = make_model()
    compiled = torch.compile(model, backend="eager")
    own = GradientMemory(compiled, threshold=0.8, alpha=math.inf)
    assert own.model is model
    optimizer = SGD(compiled.parameters(), lr=0.1)
    own.attach(optimizer)
    own.update(make_batches(0))
    assert_same(own.state_dict()["subspaces"], memory.state_dict()["subspaces"])
    before = copy.deepcopy(model.state_dict())
    for x in make_batches(1):
        take_step(compiled, optimizer, x)
    assert not torch.equal(model.first.weight, before["first.weight"])
    result = own.check(make_batches(0)[0])
    assert result.leak < 1e-5
    own.update(make_batches(1))
    assert own.tasks == 2
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["assigned", "copied"])
def test_a_model_may_be_on_the_meta_device_until_it_is_loaded(how: str) -> None:
    found = []
    for is_meta in (False, True):
        model = make_model()
        weights = copy.deepcopy(model.state_dict())
        if is_meta:
            model = model.to("meta")
        memory = GradientMemory(model, threshold=0.8, alpha=math.inf)
        if is_meta and how == "assigned":
            model.load_state_dict(weights, assign=True)
        elif is_meta:
            model.to_empty(device="cpu").load_state_dict(weights)
        optimizer = Adam(model.parameters(), lr=0.01)
        memory.attach(optimizer)
        memory.update(make_batches(0))
        for x in make_batches(1):
            take_step(model, optimizer, x)
        memory.update(make_batches(1))
        found.append({"model": model.state_dict(), "memory": memory.state_dict()["subspaces"]})
    assert_same(found[0], found[1])


STEPS: dict[str, tuple[Callable[..., Optimizer], Mode]] = {
    "SGD": (lambda p: SGD(p, lr=0.05), "auto"),
    "SGD by inputs": (lambda p: SGD(p, lr=0.05), "input"),
    "SGD with momentum by inputs": (lambda p: SGD(p, lr=0.05, momentum=0.9), "input"),
    "Adam": (lambda p: Adam(p, lr=1e-2), "auto"),
}


@pytest.mark.parametrize(("new_optimizer", "mode"), STEPS.values(), ids=STEPS.keys())
def test_training_leaves_no_trace_on_the_model(new_optimizer: Callable[..., Optimizer], mode: Mode) -> None:
    model = make_model()
    keys, attributes = list(model.state_dict()), {name: set(vars(m)) for name, m in model.named_modules()}
    memory = GradientMemory(model, threshold=0.8, alpha=math.inf)
    optimizer = new_optimizer(model.parameters())
    hook = memory.attach(optimizer, mode=mode)
    for task in range(2):
        for x in make_batches(task):
            take_step(model, optimizer, x[:8])  # fewer rows than outputs, so that inputs may be replaced
        memory.update(make_batches(task))
    for x in make_batches(2):
        take_step(model, optimizer, x[:8])
    assert ("input" in hook.modes.values()) == (mode == "input")

    assert list(model.state_dict()) == keys
    assert type(model) is MLP
    assert type(model.first) is nn.Linear
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks
    for parameter in model.parameters():
        assert parameter.requires_grad
        assert not parameter._backward_hooks
        assert not vars(parameter)

    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    never_attached = MLP()
    never_attached.load_state_dict(model.state_dict())
    x = make_batches(3)[0][:8]
    never_attached(x).square().mean().backward()
    for copied in (torch.load(file, weights_only=False), copy.deepcopy(model)):
        assert type(copied) is MLP
        copied.zero_grad()
        copied(x).square().mean().backward()
        for a, b in zip(copied.parameters(), never_attached.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert torch.equal(a.grad, b.grad)
        # A copy trains without projection.
        plain, other = SGD(copied.parameters(), lr=0.1), SGD(never_attached.parameters(), lr=0.1)
        twin = copy.deepcopy(never_attached.state_dict())
        take_step(copied, plain, x)
        take_step(never_attached, other, x)
        assert_same(dict(copied.state_dict()), dict(never_attached.state_dict()))
        never_attached.load_state_dict(twin)
        never_attached.zero_grad()
        never_attached(x).square().mean().backward()
    # The original is projected.
    before = copy.deepcopy(model.state_dict())
    take_step(model, optimizer, x)
    subspace = memory.subspaces["first"]
    change = torch.cat(
        [model.first.weight - before["first.weight"], (model.first.bias - before["first.bias"])[:, None]], 1
    )
    assert (change @ subspace.basis[0]).norm() < 1e-3 * change.norm()  # float32 rounding of so small a step


def test_a_model_may_have_extra_state() -> None:
    class Extra(MLP):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 3}

        def set_extra_state(self, state: Any) -> None:
            assert state == {"version": 3}

    memory = GradientMemory(Extra(), threshold=0.9)
    memory.update(make_batches(0))
    assert memory.check(make_batches(0)[0]).drift == 0


# Warnings and repr


def test_nearly_full_layers_are_named_in_one_warning_at_the_callers_line() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 2))
    memory = GradientMemory(model, threshold={"4": 0.5, "*": 1}, alpha=math.inf)
    full = r"nearly all of the capacity is blocked in '0' \(100\.0%\), '2' \(100\.0%\), which"
    with pytest.warns(UserWarning, match=full) as found:
        memory.update([torch.randn(50, 6)])
    assert [warning.filename for warning in found] == [__file__]


def test_a_layer_counts_as_nearly_full_above_95_percent() -> None:
    # 20 dimensions, of which 19 are blocked: 95 % exactly, and one more is above.
    for spanned, expected in ((19, 0), (20, 1)):
        memory = GradientMemory(nn.Linear(20, 2, bias=False), threshold=1, alpha=math.inf)
        inputs = torch.zeros(40, 20)
        inputs[:, :spanned] = torch.randn(40, spanned, generator=torch.Generator().manual_seed(0))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            memory.update([inputs])
        assert int(next(iter(memory.subspaces.values())).rank) == spanned
        assert len([w for w in found if "blocked" in str(w.message)]) == expected


def test_repr_shows_the_settings() -> None:
    memory = GradientMemory(make_model(), threshold=0.8, alpha=math.inf)
    settings = (
        "threshold=0.8, alpha=inf, exclude=[], bias='protect', rest='freeze', "
        "numerics={'first_rank': 'minimal', 'truncation': 'before', 'orthogonalise': True}, store='float32', "
        "gram='auto'"
    )
    assert repr(memory) == f"GradientMemory(layers=3, tasks=0, {settings})"
    memory.update(make_batches(0))
    assert repr(memory) == f"GradientMemory(layers=3, tasks=1, {settings})"
    optimizer = Adam(memory.model.parameters())
    hook = memory.attach(optimizer, mode="step", every=4)
    assert repr(hook) == "OptimizerHook(optimizer=Adam, mode='step', every=4, steps=0, attached)"
    hook.detach()
    assert repr(hook) == "OptimizerHook(optimizer=Adam, mode='step', every=4, steps=0, detached)"


# Many tasks


def make_nearly_captured_inputs(task: int, *, n: int, inputs: int) -> list[Tensor]:
    """Return inputs with one weak direction outside the old bases, for which rounding of the residual matters most."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(n, 4, generator=generator) @ torch.randn(4, inputs, generator=generator)
    own = torch.Generator().manual_seed(task)
    weak = torch.outer(torch.randn(n, generator=own), torch.randn(inputs, generator=own))
    return list((common + 1e-3 * weak).split(20))


@pytest.mark.filterwarnings("ignore:nearly all of the capacity is blocked")
@pytest.mark.parametrize(
    ("tasks", "inputs", "threshold"),
    [(make_batches, 20, lambda task: min(0.7 + 0.003 * task, 0.99)), (make_nearly_captured_inputs, 120, 1 - 1e-9)],
    ids=["random", "nearly captured"],
)
@pytest.mark.parametrize("alpha", [10, math.inf])
def test_a_hundred_tasks_stay_orthonormal_within_the_dimension(
    alpha: float, tasks: Callable[..., list[Tensor]], inputs: int, threshold: Any
) -> None:
    torch.manual_seed(0)
    model = MLP(inputs=inputs, width=24)
    memory = GradientMemory(model, threshold={"first": threshold, "*": 0.9}, alpha=alpha)
    optimizer = SGD(model.parameters(), lr=0.05)
    memory.attach(optimizer)
    sizes = []
    for task in range(100):
        data = tasks(task, n=15 if task % 2 else 140, inputs=inputs)
        take_step(model, optimizer, data[0])
        memory.update(data)
        for subspace in memory.subspaces.values():
            M, rank = subspace.basis[0].double(), int(subspace.rank)
            assert rank == M.shape[1] <= subspace.dimension
            assert (M.T @ M - torch.eye(rank)).abs().max() < 1e-6
            assert subspace.importance.min() >= 0
            assert subspace.importance.max() <= 1
        sizes.append(get_ranks(memory)["first"])
    assert memory.tasks == 100
    assert sizes == sorted(sizes)
    assert sizes[0] < 10 < sizes[-1]


@pytest.mark.parametrize(
    "batch", [torch.randn(20, 8), (torch.randn(20, 8), torch.zeros(20)), {"input": torch.randn(20, 8)}]
)
def test_a_single_batch_in_place_of_a_loader_is_refused(batch: Any) -> None:
    memory = make_learned_memory()
    before = copy_state(memory)
    with pytest.raises(TypeError, match=r"pass \[batch\]"):
        memory.update(batch)
    assert_same(copy_state(memory), before)


def test_the_error_for_a_model_that_needs_more_inputs_suggests_forward() -> None:
    class Tasks(MLP):
        def forward(self, x: Tensor, task: int) -> Tensor:  # type: ignore[override]
            return super().forward(x) + task

    memory = GradientMemory(Tasks(), threshold=0.9)
    with pytest.raises(TypeError) as caught:
        memory.update(make_batches(0))
    assert "forward=" in caught.value.__notes__[0]
    memory.update(make_batches(0), forward=lambda batch: memory.model(batch, 1))
    assert memory.tasks == 1


def test_a_bias_may_be_untrained() -> None:
    model = make_model()
    model.first.bias.requires_grad_(False)
    memory = GradientMemory(model, threshold=0.8)
    for task in range(3):
        memory.update(make_batches(task))
    memory.load_state_dict(memory.state_dict())
    assert memory.subspaces["first"].dimension == 8
    model.first.bias.requires_grad_(True)
    memory.update(make_batches(3))
    assert memory.subspaces["first"].dimension == 8
    assert "first.bias" in memory.capacity().frozen


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from PyTorch, when its compiler is first imported
@pytest.mark.parametrize(
    "wrap", [lambda m: nn.Sequential(m, nn.Dropout()), torch.compile], ids=["Sequential", "compile"]
)
def test_a_layer_that_is_wrapped_later_keeps_its_bases_and_its_protection(wrap: Callable[[nn.Module], Any]) -> None:
    memory = make_learned_memory(alpha=math.inf)
    model, stored = memory.model, memory.subspaces["second"]
    optimizer = AdamW(model.parameters(), lr=0.01)
    memory.attach(optimizer)
    model.second = wrap(model.second)
    for _ in range(5):
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    memory.update(make_batches(1), forward=lambda x: model.out(model.second(model.first(x))))
    (name,) = [name for name in memory.subspaces if name.startswith("second")]
    now = memory.subspaces[name].basis[0]
    assert name != "second"
    torch.testing.assert_close(now[:, : stored.basis.shape[2]], stored.basis[0])


@pytest.mark.filterwarnings("ignore:no input reached")
def test_a_removed_layer_gives_a_warning() -> None:
    memory = make_learned_memory()
    memory.model.second = nn.Identity()
    with pytest.warns(UserWarning, match="second is gone from the model"):
        memory.update(make_batches(1), forward=lambda x: memory.model.first(x))
    assert "second" not in memory.subspaces


def test_a_module_that_is_replaced_by_a_copy_is_protected() -> None:
    memory = make_learned_memory(alpha=math.inf)
    model = memory.model
    model.first = copy.deepcopy(model.first)
    optimizer = AdamW(model.parameters(), lr=0.01)
    hook = memory.attach(optimizer)
    for _ in range(20):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    assert "first" in hook.modes
    assert memory.check(make_batches(0)[0]).leak < 1e-4


@pytest.mark.parametrize("unattached", [True, False])
def test_biases_trained_by_an_unattached_optimizer_are_an_error(unattached: bool) -> None:
    memory = make_learned_memory()
    model = memory.model
    weights = AdamW([p for n, p in model.named_parameters() if n.endswith("weight")], lr=0.01)
    biases = SGD([p for n, p in model.named_parameters() if n.endswith("bias")], lr=0.1)
    memory.attach(weights)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        weights.step()  # also changes the biases: weight and bias have a joint change
        if unattached:
            biases.step()
    if unattached:
        with pytest.raises(RuntimeError, match=r"not attached.*bias has changed"):
            memory.update(make_batches(1))
    else:
        memory.update(make_batches(1))
        assert memory.tasks == 2


def test_a_norm_layer_trained_by_an_unattached_optimizer_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    memory = GradientMemory(model, threshold=0.8)
    memory.update(make_batches(0))
    with torch.no_grad():
        model[1].weight += 0.1
    with pytest.raises(RuntimeError, match="layer '1' was trained by an optimizer that is not attached"):
        memory.update(make_batches(1))


def test_query_key_and_value_share_a_subspace_under_any_budget() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    for budget in (1, 2**30):
        memory = GradientMemory(model, threshold=0.9)
        memory.update([torch.randn(2, 3, 8)], budget=budget)
        stored = memory.subspaces
        assert stored["self_attn:query"] is stored["self_attn:key"] is stored["self_attn:value"]
        assert stored["self_attn:query"] is not stored["linear1"]


class Attention(nn.Module):
    """Attention with separate layers for query, key and value."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.value(x) * (self.query(x) * self.key(x)).tanh()


GRAM = 8 * 9**2  # bytes of one layer's Gram matrix


@pytest.mark.parametrize(("budget", "passes"), [(3 * GRAM, 3), (4 * GRAM, 2), (6 * GRAM, 2), (7 * GRAM, 1)])
def test_a_budget_that_fits_a_parent_module_does_not_separate_its_layers(budget: int, passes: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), Attention(), Attention())
    memory = GradientMemory(model, threshold=0.9)
    assert memory.plan(20, budget=budget).passes == passes
    memory.update([torch.randn(20, 8)], budget=budget)
    stored = memory.subspaces
    for i in (1, 2):
        assert stored[f"{i}.query"] is stored[f"{i}.key"] is stored[f"{i}.value"]
    assert stored["1.query"] is not stored["2.query"]


def test_layers_that_share_bases_count_once_in_a_budget_and_are_never_separated() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), nn.Sequential(nn.Linear(8, 8)), Attention())
    memory = GradientMemory(model, threshold=0.3, alpha=0)
    memory.update([torch.randn(20, 8)])
    for budget, passes in ((1, 3), (2 * GRAM, 2), (3 * GRAM, 1)):
        assert memory.plan(20, budget=budget).passes == passes
        memory.update([torch.randn(20, 8)], budget=budget)
        stored = memory.subspaces
        for i in (0, 2):
            assert stored[f"{i}.query"] is stored[f"{i}.key"] is stored[f"{i}.value"]


def test_a_parent_module_that_does_not_fit_is_divided_between_its_layers() -> None:
    memory = GradientMemory(nn.Sequential(Attention(), Attention()), threshold=0.9)
    assert memory.plan(20, budget=2 * GRAM).passes == 4
    assert memory.plan(20, budget=1).passes == 6


def test_steps_follow_importances_that_were_set() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4, bias=False))
    memory = GradientMemory(model, threshold=0.9, alpha=math.inf)
    memory.update([torch.randn(20, 2) @ torch.randn(2, 6)])
    optimizer = SGD(model.parameters(), lr=1.0)
    memory.attach(optimizer, mode="gradient")
    weight, basis = model.get_parameter("0.weight"), memory.subspaces["0"].basis[0]
    for share in (1.0, 0.25):
        given = torch.full_like(memory.subspaces["0"].importance, share)
        memory.set_importances({"0": given})
        given.zero_()  # the memory has a copy
        before = weight.detach().clone()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        expected = -(1 - share) * torch.ones_like(weight) @ basis
        assert torch.allclose((weight.detach() - before) @ basis, expected, atol=1e-6)
    with pytest.raises(ValueError, match=r"layer '0' needs importances of shape \(1, 2\), got \(1, 5\)"):
        memory.set_importances({"0": torch.ones(1, 5)})
