"""Scans: every parameter of a model is protected, frozen or free, with a reason."""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import sgp
from sgp.patterns import check_patterns, find_pattern
from sgp.projection import layer_types
from sgp.projection.layer import ProtectedLayer
from sgp.projection.layer_types import Block, LayerType, register_layer
from sgp.projection.scan import Scan, ScanRules, scan_model


def scan(model: nn.Module, *, exclude: Sequence[str] = (), **rules: Any) -> Scan:
    return scan_model(model, ScanRules(tuple(exclude), **rules))


def name_parameters(layer: ProtectedLayer) -> list[str]:
    return [parameter.name for parameter in layer.parameters]


def name_bias(layer: ProtectedLayer) -> str | None:
    return None if layer.bias is None else layer.bias.name


def find_protected(found: Scan) -> set[str]:
    return {name for layer in found.layers.values() for name in name_parameters(layer)}


class Mixed(nn.Module):
    """A network with a parameter of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 4))
        self.words = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4, bias=False))
        self.attention = nn.MultiheadAttention(4, 2)
        self.norm = nn.LayerNorm(4)
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])


def test_a_pattern_matches_a_name_or_a_module_that_contains_it() -> None:
    assert find_pattern("heads.0.weight", ["heads.*"]) == "heads.*"
    assert find_pattern("heads.0.weight", ["heads"]) == "heads"
    assert find_pattern("heads.0.weight", ["body", "heads.?"]) == "heads.?"
    assert find_pattern("heads.0.weight", ["*.weight"]) == "*.weight"
    assert find_pattern("heads.0.weight", ["0", "weight", "head", "HEADS"]) is None
    assert find_pattern("heads_of_state.weight", ["heads"]) is None
    assert find_pattern("heads.0.weight", []) is None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.text("ab0", min_size=1, max_size=3), min_size=1, max_size=4), st.data())
def test_the_literal_name_of_every_ancestor_matches_and_no_other(parts: list[str], data: st.DataObject) -> None:
    name = ".".join(parts)
    depth = data.draw(st.integers(1, len(parts)))
    ancestor = ".".join(parts[:depth])
    assert find_pattern(name, [ancestor]) == ancestor
    assert find_pattern(name, [ancestor + "x"]) is None
    assert find_pattern(name, ["x" + ancestor]) is None


@pytest.mark.parametrize("pattern", ["head.*", "bodies", "body.7", "body.0.kernel", "Body"])
def test_a_pattern_that_matches_nothing_is_an_error_that_names_it_and_the_modules(pattern: str) -> None:
    with pytest.raises(ValueError, match="matches no module or parameter") as error:
        sgp.GradientMemory(Mixed(), threshold=0.9, exclude=["heads.*", pattern])
    assert repr(pattern) in str(error.value)
    assert "body.0" in str(error.value)


@pytest.mark.parametrize("pattern", ["heads.*", "heads", "heads.[01]", "heads.?.weight"])
def test_a_pattern_may_refer_to_an_empty_module_list(pattern: str) -> None:
    model = Mixed()
    model.heads = nn.ModuleList()
    check_patterns(model, [pattern], "exclude")
    model.heads.append(nn.Linear(4, 2))
    assert "heads.0.weight" in scan(model, exclude=[pattern]).free


def test_a_pattern_may_name_a_parameter() -> None:
    found = scan(Mixed(), exclude=["token", "body.0.bias", "attention.in_proj_weight"])
    assert {"token", "body.0.bias", "attention.in_proj_weight"} <= found.free.keys()
    assert found.layers["body.0"].bias is None
    assert "attention:attended" in found.layers
    assert "attention:query" not in found.layers


def test_the_second_name_of_a_shared_parameter_is_known_to_patterns() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    check_patterns(model, ["b.weight"], "exclude")


@pytest.mark.parametrize("bias", ["protect", "freeze"])
@pytest.mark.parametrize("rest", ["freeze", "free"])
@pytest.mark.parametrize("exclude", [[], ["heads"], ["heads.*", "body.1", "*.bias"]])
def test_every_parameter_is_either_protected_or_frozen_or_free(bias: str, rest: str, exclude: list[str]) -> None:
    model = Mixed()
    found = scan(model, bias=bias, rest=rest, exclude=exclude)
    names = {name for name, _ in model.named_parameters()}
    free = found.free.keys() & names  # free running statistics are listed there too
    assert find_protected(found) | found.frozen.keys() | free == names
    assert len(find_protected(found)) + len(found.frozen) + len(free) == len(names)
    assert all(found.frozen.values())
    assert all(found.free.values())


def test_each_parameter_that_is_not_protected_has_its_reason() -> None:
    found = scan(Mixed(), exclude=["heads.*"], bias="freeze")
    assert found.free == {f"heads.{i}.{leaf}": "excluded by 'heads.*'" for i in range(2) for leaf in ("weight", "bias")}
    assert found.frozen == {
        "token": "unknown layer type Mixed",
        "body.0.bias": "bias of a protected layer, frozen (bias)",
        "body.1.weight": "norm",
        "body.1.bias": "norm",
        "attention.in_proj_bias": "bias of a protected layer, frozen (bias)",
        "attention.out_proj.bias": "bias of a protected layer, frozen (bias)",
        "norm.weight": "norm",
        "norm.bias": "norm",
    }
    assert found.norm_modules == ["body.1"]


def test_rest_free_lists_other_parameters_and_running_statistics() -> None:
    found = scan(Mixed(), rest="free")
    assert not found.frozen
    assert not found.norm_modules
    assert found.free["norm.weight"] == found.free["body.1.weight"] == "norm"
    assert found.free["token"] == "unknown layer type Mixed"
    assert "norm statistics" in found.free["body.1.running_mean"]
    assert "norm statistics" in found.free["body.1.running_var"]


def test_running_statistics_of_an_excluded_norm_layer_are_free_and_listed() -> None:
    found = scan(Mixed(), exclude=["body.1"])
    assert found.norm_modules == []
    assert "excluded by 'body.1'" in found.free["body.1.running_mean"]


def test_layers_are_named_by_module_and_input_and_have_their_parameters() -> None:
    found = scan(Mixed(), exclude=["heads"])
    inputs = [f"attention:{name}" for name in ("query", "key", "value", "attended")]
    assert list(found.layers) == ["words", "body.0", "body.2", *inputs]
    assert name_parameters(found.layers["body.0"]) == ["body.0.weight", "body.0.bias"]
    assert name_parameters(found.layers["body.2"]) == ["body.2.weight"]
    assert name_parameters(found.layers["attention:key"]) == ["attention.in_proj_weight", "attention.in_proj_bias"]
    assert found.layers["attention:attended"].weight.name == "attention.out_proj.weight"


def test_a_model_that_is_one_layer_is_protected_under_a_name() -> None:
    found = scan(nn.Linear(3, 2))
    assert name_parameters(found.layers["(model)"]) == ["weight", "bias"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: None, "token"),
        (lambda model: setattr(model, "words", nn.EmbeddingBag(5, 4)) or delattr(model, "token"), "words.weight"),
    ],
)
def test_strict_refuses_an_unknown_layer_type_and_names_the_parameter(
    change: Callable[[nn.Module], None], name: str
) -> None:
    model = Mixed()
    change(model)
    with pytest.raises(TypeError, match=rf"'{name}'.*register_layer"):
        sgp.GradientMemory(model, threshold=0.9, strict=True)


def test_strict_accepts_norm_layers_frozen_parameters_and_excluded_layers() -> None:
    model = Mixed()
    model.token.requires_grad_(False)
    found = scan(model, strict=True, exclude=["words"])
    assert found.frozen["token"] == "not trained (requires_grad is False)"


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    "parametrize",
    [
        weight_norm,
        spectral_norm,
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
    ],
)
@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 3), lambda: nn.Conv2d(3, 3, 1, groups=3)])
def test_a_parametrized_weight_is_refused_by_name(
    parametrize: Callable[[nn.Module], nn.Module], make: Callable[[], nn.Module]
) -> None:
    model = nn.Sequential(OrderedDict(first=nn.Linear(3, 3), second=parametrize(make())))
    with pytest.raises(TypeError, match="'second': its weight is parametrized"):
        sgp.GradientMemory(model, threshold=0.9)
    found = scan(model, exclude=["second"])
    assert list(found.layers) == ["first"]
    assert all(why == "excluded by 'second'" for why in found.free.values())


def test_a_parametrized_bias_and_a_parametrized_output_projection_are_refused_too() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3), "bias", dim=None))
    with pytest.raises(TypeError, match="'0': its bias is parametrized"):
        scan(model)
    attention = nn.MultiheadAttention(4, 2)
    parametrizations.weight_norm(attention.out_proj)
    with pytest.raises(TypeError, match=r"out_proj.*parametrized|parametrized.*out_proj"):
        scan(nn.Sequential(attention))


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(3), lambda: nn.LazyConv2d(3, 1)])
def test_a_lazy_layer_is_refused_by_name_until_a_batch_has_run(make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(make())
    with pytest.raises(TypeError, match="'0' is lazy"):
        sgp.GradientMemory(model, threshold=0.9)
    model(torch.zeros(2, 3, 3, 3))
    assert list(scan(model).layers) == ["0"]


def make_tied(*, first_bias: bool, second_bias: bool) -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(12, 12, bias=first_bias), nn.Tanh(), nn.Linear(12, 12, bias=second_bias), nn.Linear(12, 2)
    )
    model[2].weight = model[0].weight
    return model


def test_a_weight_tied_between_two_linear_layers_is_one_layer_with_two_sources() -> None:
    found = scan(make_tied(first_bias=True, second_bias=True))
    assert list(found.layers) == ["0", "3"]
    assert [source.module for source in found.layers["0"].sources] == ["0", "2"]
    assert [source.module for source in found.layers["3"].sources] == ["3"]
    assert found.layers["0"].bias is None
    assert name_bias(found.layers["3"]) == "3.bias"
    why = "bias of a protected layer, frozen (tied weight)"
    assert found.frozen == {"0.bias": why, "2.bias": why}


def test_a_tied_weight_with_a_bias_on_one_side_only_freezes_it() -> None:
    for first in (True, False):
        found = scan(make_tied(first_bias=first, second_bias=not first))
        assert found.layers["0"].bias is None
        assert list(found.frozen) == ["0.bias" if first else "2.bias"]


def test_a_bias_tied_together_with_its_weight_stays_protected() -> None:
    model = make_tied(first_bias=True, second_bias=True)
    model[2].bias = model[0].bias
    found = scan(model)
    assert name_bias(found.layers["0"]) == "0.bias"
    assert len(found.layers["0"].sources) == 2
    assert not found.frozen


def test_a_bias_shared_between_layers_of_different_weights_is_frozen() -> None:
    # Each layer would project its own joint change, and revert the one of the other.
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].bias = model[0].bias
    found = scan(model)
    assert [name_bias(layer) for layer in found.layers.values()] == [None, None]
    assert found.frozen == {"0.bias": "bias of a protected layer, frozen (shared)"}


def step_on_other_data(model: nn.Module, x: Tensor, **changes: Any) -> float:
    """Return the change of outputs for remembered inputs relative to the change of outputs for others."""
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf, **changes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    memory.attach(optimizer)
    memory.update([x])
    others = torch.randn_like(x) if x.is_floating_point() else x.new_tensor([[5, 6, 7]])
    before, before_others = model(x).detach(), model(others).detach()
    for _ in range(5):
        optimizer.zero_grad()
        model(others).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        moved, learned = (model(x) - before).norm(), (model(others) - before_others).norm()
    assert float(learned) > 1e-3
    return float(moved / learned)


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True), (False, False)])
def test_outputs_of_a_tied_weight_do_not_change_whatever_its_biases(first: bool, second: bool) -> None:
    torch.manual_seed(0)
    assert step_on_other_data(make_tied(first_bias=first, second_bias=second), torch.randn(3, 12)) < 1e-5


@pytest.mark.parametrize("also_weight", [True, False])
def test_outputs_of_a_shared_bias_do_not_change(also_weight: bool) -> None:
    torch.manual_seed(0)
    model = (
        make_tied(first_bias=True, second_bias=True)
        if also_weight
        else nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
    )
    model[2].bias = model[0].bias
    assert step_on_other_data(model, torch.randn(3, 12)) < 1e-5


class Language(nn.Module):
    """An output layer that shares its weight with an embedding, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(12, 8)
        self.body = nn.Linear(8, 8)
        self.output = nn.Linear(8, 12)
        self.output.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.body(self.words(tokens)).tanh())


def test_a_weight_shared_with_an_unknown_layer_type_is_not_protected() -> None:
    torch.manual_seed(0)
    found = scan(Language())
    assert list(found.layers) == ["body"]
    assert found.frozen["words.weight"] == "unknown layer type EmbeddingBag, which shares it"
    with pytest.warns(UserWarning, match="EmbeddingBag: unknown layer type, with 53.3% of all parameters"):
        assert step_on_other_data(Language(), torch.tensor([[0, 1, 2]])) < 1e-5
    free = scan(Language(), rest="free")
    assert free.free["words.weight"] == "unknown layer type EmbeddingBag, which shares it"
    with pytest.raises(TypeError, match=r"'words.weight'.*Embedding"):
        scan(Language(), strict=True)


def test_a_weight_shared_with_an_excluded_layer_is_protected_in_the_other() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    found = scan(model, exclude=["1"])
    assert [source.module for source in found.layers["0"].sources] == ["0"]
    assert not found.free


def test_a_weight_used_from_both_sides_has_two_layers_and_a_frozen_bias(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_types, "_LAYER_TYPES", layer_types._LAYER_TYPES.copy())

    class Transposed(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    @register_layer(Transposed)
    class TransposedType(LayerType):
        def find_blocks(self, module: nn.Module) -> Sequence[Block]:
            return [Block("weight", input_dim=0)]

    torch.manual_seed(0)
    linear = nn.Linear(12, 10)
    model = nn.Sequential(linear, nn.Tanh(), Transposed(linear.weight))
    found = scan(model)
    assert {name: layer.weight.name for name, layer in found.layers.items()} == {"0": "0.weight", "2": "0.weight"}
    assert found.layers["0"].bias is None
    assert found.frozen == {"0.bias": "bias of a protected layer, frozen (tied weight)"}
    assert step_on_other_data(model, torch.randn(3, 12)) < 1e-5


def test_blocks_with_the_same_input_are_separate_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_types, "_LAYER_TYPES", layer_types._LAYER_TYPES.copy())

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(4, 3))
            self.value = nn.Parameter(torch.zeros(4, 3))
            self.packed = nn.Parameter(torch.zeros(8, 3))
            self.offset = nn.Parameter(torch.zeros(4))

    @register_layer(Gated)
    class GatedType(LayerType):
        def find_blocks(self, module: nn.Module) -> Sequence[Block]:
            return two_blocks

    for names, two_blocks in (
        (["0:gate", "0:value"], [Block("gate"), Block("value", "offset")]),
        (
            ["0:packed[0:4]", "0:packed[4:]"],
            [Block("packed", rows=(0, 4)), Block("packed", "offset", rows=(4, None), bias_rows=(0, 4))],
        ),
    ):
        found = scan(nn.Sequential(Gated()))
        assert list(found.layers) == names
        assert [layer.block for layer in found.layers.values()] == two_blocks
        # The second block has a bias and the first has none; the weight is not tied.
        assert [name_bias(layer) for layer in found.layers.values()] == [None, "0.offset"]


def test_untrained_parameters_are_skipped() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    found = scan(model, strict=True)
    assert list(found.layers) == ["1", "2"]
    assert name_parameters(found.layers["1"]) == ["1.weight"]
    assert found.frozen == dict.fromkeys(["0.weight", "0.bias", "1.bias"], "not trained (requires_grad is False)")


def test_a_bias_that_is_trained_without_its_weight_is_not_an_unknown_layer() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].weight.requires_grad_(False)
    found = scan(model, strict=True)
    assert found.frozen["0.bias"] == "bias of a layer whose weight is not protected"
    model[0].weight.requires_grad_(True)
    found = scan(model, exclude=["1.weight"], strict=True, rest="free")
    assert found.free["1.bias"] == "bias of a layer whose weight is not protected"


class LowRank(nn.Module):
    """A frozen layer and its trained low-rank adapter, as in LoRA."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_lora_adapters_are_protected_and_their_frozen_base_is_not() -> None:
    found = scan(nn.Sequential(LowRank(nn.Linear(6, 4)), nn.ReLU(), LowRank(nn.Linear(4, 2))), strict=True)
    assert list(found.layers) == ["0.down", "0.up", "2.down", "2.up"]
    assert set(found.frozen) == {"0.base.weight", "0.base.bias", "2.base.weight", "2.base.bias"}


def test_a_model_with_no_layer_to_protect_is_refused() -> None:
    for model, exclude in ((nn.LayerNorm(3), []), (nn.Linear(3, 3), ["*"]), (nn.Identity(), [])):
        with pytest.raises(ValueError, match="no layer to protect"):
            sgp.GradientMemory(model, threshold=0.9, exclude=exclude)


def test_a_head_that_is_added_later_is_found_at_the_next_update() -> None:
    model = nn.ModuleDict({"body": nn.Linear(6, 4), "heads": nn.ModuleList()})
    memory = sgp.GradientMemory(model, threshold=0.9, exclude=["heads.*"])
    assert memory.capacity().free == {}
    model["heads"].append(nn.Linear(4, 2))
    memory.update([torch.randn(3, 6)], forward=lambda x: model["heads"][0](model["body"](x)))
    assert set(memory.capacity().free) == {"heads.0.weight", "heads.0.bias"}
    assert [layer.layer for layer in memory.capacity().layers] == ["body"]


def test_a_subclass_that_overrides_forward_does_not_have_the_type_of_its_parent() -> None:
    class Normalising(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input / input.norm())

    class Named(nn.Linear):
        """A subclass without changes."""

    model = nn.Sequential(Normalising(3, 3), Named(3, 3))
    with pytest.warns(UserWarning, match="Normalising: unknown layer type, with 50.0% of all parameters"):
        memory = sgp.GradientMemory(model, threshold=0.9)
    assert list(memory.layers) == ["1"]
    assert memory.capacity().frozen["0.weight"] == "unknown layer type Normalising"
    with pytest.raises(TypeError, match="Normalising"):
        sgp.GradientMemory(model, threshold=0.9, strict=True)


def test_two_parameters_that_share_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(TypeError, match=r"layer '1': its weight shares memory with '0\.weight'"):
        sgp.GradientMemory(model, threshold=0.9)


def test_complex_weights_are_frozen_like_an_unknown_layer_type() -> None:
    model = nn.Sequential(nn.Linear(3, 3, dtype=torch.complex64), nn.Linear(3, 3))
    with pytest.warns(UserWarning, match="unknown layer type"):
        memory = sgp.GradientMemory(model, threshold=0.9)
    assert list(memory.layers) == ["1"]
    assert "0.weight" in memory.capacity().frozen
