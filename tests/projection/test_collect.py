"""Inputs of layers stream into statistics, and collecting them leaves no trace."""

import copy
import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from projection.collecting import (
    Keywords,
    X,
    assert_is_gram_of,
    assert_same_trace,
    collect_grams,
    gram,
    gram_of,
    images,
    trace,
    trained_net,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sgp
from sgp.projection import layer_types
from sgp.projection.gram import InputGram
from sgp.projection.layer_types import Block, LayerType, MultiheadAttentionType, register_layer
from sgp.projection.scan import ScanRules, scan_model
from sgp.projection.tokens import TokenCounts


def test_inputs_are_those_of_eval_mode() -> None:
    model = trained_net()
    x = images(6)
    found = collect_grams(model, [x])
    reference = copy.deepcopy(model).eval()
    with torch.no_grad():
        features = reference.norm(reference.conv(x)).relu().flatten(1)
    assert_is_gram_of(found["fc"], features)


def test_a_module_used_twice_in_one_forward_collects_both_inputs() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.fc(x).tanh())

    model, x = Twice(), torch.randn(5, 4)
    found = collect_grams(model, [x])["fc"]
    assert found.count == 10
    assert_is_gram_of(found, x, model.fc(x).tanh().detach())


def test_a_tied_weight_collects_the_inputs_of_both_its_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    x = torch.randn(5, 4)
    found = collect_grams(model, [x])
    assert list(found) == ["0"]
    assert_is_gram_of(found["0"], x, model[:2](x).detach())


def test_a_tied_kernel_is_unfolded_as_each_of_its_layers_does() -> None:
    model = nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.Conv1d(2, 2, 3, stride=2, dilation=2))
    model[1].weight = model[0].weight
    found = collect_grams(model, [torch.randn(3, 2, 9)])
    assert found["0"].count == 3 * 9 + 3 * 3


def test_a_tied_block_does_not_share_what_its_other_layer_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_types, "_LAYER_TYPES", layer_types._LAYER_TYPES.copy())

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.value = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.gate.T).sigmoid() * (x @ self.value.T)

    @register_layer(Gated)
    class GatedType(LayerType):
        def find_blocks(self, module: nn.Module) -> list[Block]:
            return [Block("gate"), Block("value")]

    model = nn.Sequential(Gated(), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].gate
    x = torch.randn(5, 4)
    found = collect_grams(model, [x])
    assert_is_gram_of(found["0:gate"], x, model[0](x).detach())
    assert_is_gram_of(found["0:value"], x)


class CallsItsOutputProjection(nn.MultiheadAttention):
    """Shows its output projection by calling it, as some do."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
        output, weights = super().forward(query, key, value, **kwargs)
        return self.out_proj(output), weights


def test_each_source_of_a_guard_is_read_by_its_own_layer_type() -> None:
    register_layer(CallsItsOutputProjection)(MultiheadAttentionType)  # it has a forward of its own
    model, x = CallsItsOutputProjection(4, 2, batch_first=True), torch.randn(2, 3, 4)
    found = collect_grams(model, [x], forward=lambda x: model(x, x, x))
    assert found["(model):attended"].count > 0


def test_samples_are_counted_over_batches_and_the_pass_ends_with_the_last_of_them() -> None:
    given = []

    def batches() -> Iterator[Tensor]:
        for i in range(5):
            given.append(i)
            yield X + i

    found = collect_grams(Keywords(), batches(), samples=8)
    assert given == [0, 1]
    assert_is_gram_of(found["fc"], X, X[:2] + 1)


def test_each_layer_may_have_its_own_number_of_samples() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    batches = [X, X + 1, X + 2]
    found = collect_grams(model, batches, samples={"0": 3, "1": 7})
    assert {name: s.count for name, s in found.items()} == {"0": 3, "1": 7, "2": 18}
    assert_is_gram_of(found["0"], X[:3])
    assert_is_gram_of(found["1"], model[0](torch.cat([X, X[:1] + 1])).detach())

    memory = sgp.GradientMemory(model, threshold=1.0, bias="freeze")
    memory.update(batches, samples={"0": 1, "[12]": 3})
    assert {name: int(s.rank) for name, s in memory.subspaces.items()} == {"0": 1, "1": 3, "2": 3}


@pytest.mark.parametrize("samples", [0, -1, {"*": 0}])
def test_a_number_of_samples_below_one_is_refused(samples: Any) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        sgp.GradientMemory(Keywords(), threshold=0.9).update([X], samples=samples)


def test_samples_of_attention_are_sequences_whichever_dimension_they_lie_along() -> None:
    for batch_first in (True, False):
        model = nn.MultiheadAttention(4, 2, batch_first=batch_first)
        x = torch.randn(5, 3, 4)
        given = x if batch_first else x.transpose(0, 1)
        found = collect_grams(model, [{"samples": x}], samples=2, forward=lambda _, x=given, m=model: m(x, x, x))
        assert_is_gram_of(found["(model):query"], x[:2])


def test_a_mask_tells_how_many_samples_a_batch_has_where_its_first_tensor_does_not() -> None:
    model = nn.Linear(4, 3)
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=math.inf)
    x = torch.randn(6, 2, 4)
    batch = {"task": torch.tensor([0]), "x": x}
    keep = torch.tensor([[True, False]] * 6)
    memory.update([batch], forward=lambda batch: model(batch["x"]), mask=lambda batch: keep, samples=2)
    assert int(memory.subspaces["(model)"].rank) == 2


def test_samples_folded_with_windows_take_their_share_of_the_items() -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x.reshape(-1, 2, 2))  # two windows of two rows each

    x = torch.randn(4, 8)
    found = collect_grams(Windows(), [x], samples=3)["fc"]
    assert_is_gram_of(found, x[:3].reshape(-1, 2))


def test_the_whole_batch_runs_where_a_norm_layer_takes_the_statistics_of_the_batch() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2))
    found = collect_grams(model, [X], samples=2)
    assert found["1"].count == 2
    assert_is_gram_of(found["1"], model[0](X)[:2].detach())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
    st.integers(1, 8),
    st.sampled_from(["freeze", "protect"]),
    st.integers(0, 99),
)
def test_a_stream_of_batches_has_the_gram_matrix_of_all_at_once(
    sizes: list[int], inputs: int, bias: str, seed: int
) -> None:
    x = torch.randn(sum(sizes), inputs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    model = nn.Linear(inputs, 2).double()
    streamed = collect_grams(model, torch.split(x, sizes), bias=bias)["(model)"]
    rows = torch.cat([x, x.new_ones(len(x), 1)], dim=1) if bias == "protect" else x
    assert streamed.count == len(x)
    assert streamed.dimension == rows.shape[1]
    torch.testing.assert_close(gram(streamed), gram_of(rows))
    # Rows are kept while there are fewer than dimensions, and never beside the Gram matrix.
    assert (streamed.get_rows() is None) == (len(x) >= streamed.dimension)
    assert streamed.nbytes <= 8 * streamed.dimension**2


def test_convolutions_stream_as_linear_layers_do_and_large_inputs_go_in_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = nn.Conv2d(4, 4, 3, groups=2, padding=1), torch.randn(6, 4, 5, 5)
    whole = collect_grams(model, [x], bias="protect")["(model)"]
    streamed = collect_grams(model, torch.split(x, 4), bias="protect")["(model)"]
    monkeypatch.setattr("sgp.projection.collect.BYTES_PER_CHUNK", 1)
    monkeypatch.setattr("sgp.projection.gram.ROWS_PER_PRODUCT", 3)
    in_chunks = collect_grams(model, [x], bias="protect")["(model)"]
    assert whole.groups == 2
    assert whole.count == streamed.count == in_chunks.count == 6 * 25
    for other in (streamed, in_chunks):
        torch.testing.assert_close(other.get_gram(), whole.get_gram())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("grad", [False, True])
def test_what_is_held_is_bounded_however_long_the_stream_is(dtype: torch.dtype, grad: bool) -> None:
    model = nn.Linear(9, 3).to(dtype)
    layer = scan_model(model, ScanRules()).layers["(model)"]
    inputs = InputGram(1, 9, constant=True)
    for _ in range(200):
        inputs.add(layer.layer_type.unfold_rows(model, torch.randn(3, 9, dtype=dtype, requires_grad=grad)))
        assert inputs.nbytes <= 10 * 10 * 8
        assert inputs.get_rows() is not None or not inputs.get_gram().requires_grad
    assert inputs.count == 600


def test_a_forward_that_turns_gradients_on_keeps_no_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return model(x)

    found = collect_grams(model, [X, X], forward=forward)
    assert not any(s.get_gram().requires_grad for s in found.values())


def subspaces_of(model: nn.Module, batches: Iterable[Any], **settings: Any) -> dict[str, Tensor]:
    """Projectors M M^T of an update: the spaces, whatever their bases."""
    memory = sgp.GradientMemory(model, threshold=settings.pop("threshold", 0.95), alpha=10)
    memory.update(batches, **settings)
    return {name: s.basis.double() @ s.basis.double().mT for name, s in memory.subspaces.items()}


@pytest.mark.filterwarnings("ignore:.*can hardly learn")
@pytest.mark.parametrize("threshold", [0.95, 1.0])
@pytest.mark.parametrize("count", [8, 64])
def test_the_same_data_in_another_order_give_the_same_space_to_1e_5(threshold: float, count: int) -> None:
    model, x = trained_net(), images(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    first = subspaces_of(model, torch.split(x, 8), threshold=threshold)
    second = subspaces_of(model, torch.split(x[order], 5), threshold=threshold)
    assert first.keys() == second.keys() == {"conv", "fc"}
    for name, projector in first.items():
        torch.testing.assert_close(second[name], projector, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kept", [True, False])
def test_nan_or_an_infinity_names_the_layer_and_nothing_changes(value: float, kept: bool) -> None:
    model = nn.Sequential()
    model.add_module("first", nn.Linear(4, 6, bias=False))
    model.add_module("second", nn.Linear(6, 2))
    memory = sgp.GradientMemory(model, threshold=0.9)
    memory.update([X[:3]])
    before = copy.deepcopy(memory.state_dict())
    x = torch.randn(1 if kept else 20, 4)  # few rows are kept as they are, many are folded
    generator = torch.Generator()
    traced = trace(model, generator)
    with pytest.raises(FloatingPointError, match=r"'first'.*NaN or an infinity"):
        memory.update([x, x.clone().index_fill_(0, torch.tensor([0]), value)])
    with torch.no_grad():
        weight = model.first.weight.clone()
        model.first.weight[2] = value
    with pytest.raises(FloatingPointError, match=r"'second'.*NaN or an infinity"):
        memory.update([x], allow_unattached=True)
    with torch.no_grad():
        model.first.weight.copy_(weight)
    assert_same_trace(traced, trace(model, generator))
    after = memory.state_dict()
    assert after["tasks"] == before["tasks"] == 1
    for old, new in zip(before["subspaces"], after["subspaces"], strict=True):
        assert torch.equal(old["basis"], new["basis"])
        assert torch.equal(old["importance"], new["importance"])


@pytest.mark.parametrize("batches", [[], iter([]), DataLoader(TensorDataset(torch.zeros(0, 4)), 2)])
def test_an_empty_loader_is_refused_and_nothing_changes(batches: Iterable[Any]) -> None:
    memory = sgp.GradientMemory(Keywords(), threshold=0.9)
    with pytest.raises(ValueError, match="no batch"):
        memory.update(batches)
    assert memory.tasks == 0


def test_batches_that_pass_the_model_by_are_refused() -> None:
    memory = sgp.GradientMemory(Keywords(), threshold=0.9)
    with pytest.raises(ValueError, match="none of the protected layers saw an input"):
        memory.update([X], forward=lambda x: x)
    assert memory.tasks == 0


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


@pytest.mark.parametrize("make", [lambda: (trained_net(), images(24)), lambda: (Encoder(), torch.randn(12, 3, 8))])
@pytest.mark.parametrize("samples", [None, 7])
def test_several_passes_under_a_small_budget_give_the_subspaces_of_one(
    make: Callable[[], tuple[nn.Module, Tensor]], samples: int | None
) -> None:
    torch.manual_seed(0)
    model, x = make()
    # Each pass must see the same samples, though the loader shuffles.
    loader = DataLoader(TensorDataset(x), 5, shuffle=True)
    passes: list[int] = []
    model.register_forward_pre_hook(lambda module, args: passes.append(len(args[0])))
    at_once = subspaces_of(model, loader, samples=samples)
    one_pass = len(passes)
    one_by_one = subspaces_of(model, loader, samples=samples, budget=1)
    modules = {name.partition(":")[0] for name in at_once}
    assert len(passes) == one_pass * (1 + len(modules))
    assert one_by_one.keys() == at_once.keys()
    for name, projector in at_once.items():
        torch.testing.assert_close(one_by_one[name], projector, rtol=0, atol=1e-9, msg=name)


def test_an_iterator_is_refused_where_one_pass_is_not_enough_and_none_of_it_is_taken() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    memory = sgp.GradientMemory(model, threshold=0.9)
    for batches in (iter([X, X]), (x for x in [X, X])):
        with pytest.raises(ValueError, match=r"2 passes.*larger budget="):
            memory.update(batches, budget=8 * 5 * 5)
        assert len(list(batches)) == 2
    assert memory.tasks == 0
    memory.update(iter([X, X]), budget=2 * 8 * 5 * 5)
    assert memory.tasks == 1


def test_an_operation_in_place_after_a_layer_does_not_corrupt_what_was_collected() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU(inplace=True)
            self.first = nn.Linear(8, 8)
            self.second = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = x + 0
            y = self.first(x)
            self.act(x)  # overwrites what the first layer has read
            return self.second(self.act(y))

    model, x = InPlace(), torch.randn(5, 8)
    found = collect_grams(model, [x])
    assert found["first"].get_rows() is not None  # fewer rows than dimensions: kept as they are
    assert_is_gram_of(found["first"], x)
    assert_is_gram_of(found["second"], model.first(x).relu().detach())


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_layers_inside_the_fused_transformer_kernel_are_collected(batch_first: bool, mask: bool) -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 12, batch_first=batch_first), 2, enable_nested_tensor=batch_first
    ).eval()
    x = torch.randn(4, 3, 8)
    padding = torch.zeros(4, 3, dtype=torch.bool)
    padding[0, 2] = True
    given = x if batch_first else x.transpose(0, 1)
    batch = {"src": given} | ({"src_key_padding_mask": padding} if mask else {})
    found = collect_grams(model, [batch])
    for i in range(2):
        for name in ("self_attn:query", "self_attn:attended", "linear1", "linear2"):
            assert found[f"layers.{i}.{name}"].count == 12, name
    assert_is_gram_of(found["layers.0.self_attn:query"], x)
    inner: list[Tensor] = []
    first = model.layers[0].train()  # in training the kernel is not used and the modules inside are called
    for module in first.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    first.self_attn.dropout = 0.0
    first.linear2.register_forward_pre_hook(lambda module, args: inner.append(args[0].detach()))
    first(given, src_key_padding_mask=padding if mask else None)
    assert_is_gram_of(found["layers.0.linear2"], inner[0])


@pytest.mark.parametrize("samples", [None, 2])
@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize(("n", "length"), [(3, 6), (6, 3), (4, 4)])
def test_transformers_with_positions_first_collect_what_those_with_samples_first_do(
    n: int, length: int, is_masked: bool, samples: int | None
) -> None:
    x = torch.randn(n, length, 8, generator=torch.Generator().manual_seed(1))
    keep = torch.arange(length) < torch.arange(1, n + 1).unsqueeze(1)  # the first texts are short
    found = []
    for batch_first in (True, False):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=batch_first)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(batch: Any, model: nn.Module = model, batch_first: bool = batch_first) -> None:
            x, keep = batch
            model(x if batch_first else x.transpose(0, 1), src_key_padding_mask=~keep)

        mask = (lambda batch: batch[1]) if is_masked else None
        found.append(collect_grams(model, [(x, keep)], forward=forward, mask=mask, samples=samples))
    for name, inputs in found[0].items():
        assert inputs.count == (keep[:samples].sum() if is_masked else x[:samples, :, 0].numel()), name
        assert inputs.count == found[1][name].count, name
        torch.testing.assert_close(gram(inputs), gram(found[1][name]), rtol=1e-4, atol=1e-4)


def test_a_mask_shows_where_layers_of_ones_own_have_positions_first() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
    tokens = torch.randint(0, 9, (5, 7))
    keep = torch.rand(5, 7) < 0.6
    batch = {"tokens": tokens, "keep": keep}
    options: dict[str, Any] = {"mask": lambda batch: batch["keep"], "samples": 3}
    plain = collect_grams(model, [batch], forward=lambda batch: model(batch["tokens"]), **options)
    across = collect_grams(model, [batch], forward=lambda batch: model(batch["tokens"].mT), **options)
    for found in (plain, across):
        words = found["0"]
        assert isinstance(words, TokenCounts)
        assert torch.equal(words.counts, torch.bincount(tokens[:3][keep[:3]], minlength=9))
        assert_is_gram_of(found["1"], model[0](tokens[:3][keep[:3]]).detach())


NAMES = ("query", "key", "value")


def attention_subspaces(*calls: tuple[Tensor, Tensor, Tensor]) -> tuple[sgp.GradientMemory, dict[str, Any]]:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    memory = sgp.GradientMemory(model, threshold=1.0)
    memory.update([calls], forward=lambda calls: [model(*call) for call in calls])
    return memory, {name: memory.subspaces[f"(model):{name}"] for name in NAMES}


def test_self_attention_shares_one_subspace_across_query_key_and_value() -> None:
    x, y = torch.randn(1, 2, 8), torch.randn(1, 2, 8)
    memory, found = attention_subspaces((x, x, x), (y, y, y))
    assert found["query"] is found["key"] is found["value"]
    assert int(found["query"].rank) == 4  # both calls are in it
    assert [layer.shares for layer in memory.capacity().layers[:3]] == [None, *["(model):query"] * 2]
    memory.update([x], forward=lambda x: memory.model(x, x, x))
    assert memory.subspaces["(model):query"] is memory.subspaces["(model):value"]


def test_cross_attention_shares_between_key_and_value_alone() -> None:
    x, y = torch.randn(2, 3, 8), torch.randn(2, 2, 8)
    _, found = attention_subspaces((x, y, y))
    assert found["query"] is not found["key"]
    assert found["key"] is found["value"]


@pytest.mark.parametrize("self_first", [True, False])
def test_a_module_used_for_self_and_cross_attention_parts_and_each_input_has_its_own(self_first: bool) -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x, y, z, w = (torch.randn(2, n, 8) for n in (3, 3, 2, 2))
    calls = [(x, x, x), (y, z, z), (y, z, w), (w, w, w)]
    calls = calls if self_first else calls[::-1]
    found = collect_grams(model, [calls], forward=lambda calls: [model(*call) for call in calls])
    for i, name in enumerate(NAMES):
        assert_is_gram_of(found[f"(model):{name}"], *(call[i] for call in calls))
        assert found[f"(model):{name}"].count == sum(call[i].shape[0] * call[i].shape[1] for call in calls)
    assert len({id(found[f"(model):{name}"]) for name in NAMES}) == 3


def test_a_threshold_of_its_own_parts_a_subspace_that_reads_the_same_input() -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    memory = sgp.GradientMemory(model, threshold={"*:value": 0.3, "*": 1.0})
    x = torch.randn(2, 3, 8)
    memory.update([x], forward=lambda x: model(x, x, x))
    found = memory.subspaces
    assert found["(model):query"] is found["(model):key"]
    assert int(found["(model):value"].rank) < int(found["(model):query"].rank)


class Branches(nn.Module):
    """Linear layers; which of a batch's tensors each reads is told batch by batch."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 2) for _ in range(layers))

    def forward(self, tensors: list[Tensor], plan: list[tuple[int, int]]) -> None:
        for layer, which in plan:
            self.layers[layer](tensors[which])


# Per batch, which layer reads which of that batch's two tensors, in the order of the calls.
calls = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=6)


@settings(max_examples=150, deadline=None)
@given(st.lists(calls, min_size=1, max_size=4), st.integers(1, 4))
def test_layers_share_a_statistic_exactly_as_long_as_they_read_the_same_tensors(
    plans: list[list[tuple[int, int]]], rows: int
) -> None:
    assert_each_layer_has_what_it_read(plans, rows=rows)


def assert_each_layer_has_what_it_read(plans: list[list[tuple[int, int]]], *, rows: int) -> None:
    layers, tensors = (1 + max((call[i] for plan in plans for call in plan), default=0) for i in range(2))
    generator = torch.Generator().manual_seed(0)
    batches = [([torch.randn(rows, 3, generator=generator) for _ in range(tensors)], plan) for plan in plans]
    model = Branches(layers)
    found = collect_grams(model, batches, forward=lambda batch: model(*batch))
    read: dict[str, list[Tensor]] = {f"layers.{i}": [] for i in range(layers)}
    for given_tensors, plan in batches:
        for layer, which in plan:
            read[f"layers.{layer}"].append(given_tensors[which])
    assert found.keys() == {name for name, inputs in read.items() if inputs}
    for name, inputs in found.items():
        assert inputs.count == rows * len(read[name])
        assert_is_gram_of(inputs, *read[name])


def test_a_layer_that_leaves_the_others_late_does_not_inherit_what_the_first_to_leave_read_before() -> None:
    q, k, v = range(3)
    a, b, c = range(3)
    assert_each_layer_has_what_it_read([[(q, a), (k, a), (v, a), (q, a), (k, b), (k, c), (v, c)]], rows=1)


def test_layers_that_call_by_chance_have_what_they_read() -> None:
    draw = random.Random(0)
    for _ in range(300):
        layers, tensors = draw.randint(3, 4), draw.randint(2, 3)
        plans = [
            [(draw.randrange(layers), draw.randrange(tensors)) for _ in range(draw.randint(1, 12))]
            for _ in range(draw.randint(1, 3))
        ]
        plans[0] = [(layer, 0) for layer in range(layers)] + plans[0]  # they share before they part
        assert_each_layer_has_what_it_read(plans, rows=draw.randint(1, 4))


def test_layers_in_a_row_that_read_one_tensor_share_throughout_and_others_do_not() -> None:
    model = Branches()
    batches = [([torch.randn(4, 3) for _ in range(2)], [(0, 0), (1, 0), (2, 1)]) for _ in range(3)]
    found = collect_grams(model, batches, forward=lambda batch: model(*batch))
    assert found["layers.0"] is found["layers.1"]
    assert found["layers.2"] is not found["layers.0"]


def test_a_tensor_that_was_changed_in_place_between_two_layers_is_another() -> None:
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])

    def forward(x: Tensor) -> None:
        model[0](x)
        x *= 2
        model[1](x)

    data = torch.randn(5, 3)
    found = collect_grams(model, [data.clone()], forward=forward)
    assert_is_gram_of(found["0"], data)
    assert_is_gram_of(found["1"], 2 * data)


def test_convolutions_that_unfold_the_same_maps_otherwise_do_not_share() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.same, self.other = nn.Conv2d(2, 3, 3), nn.Conv2d(2, 5, 3), nn.Conv2d(2, 3, 3, stride=2)
            self.same.stride = [1, 1]  # type: ignore[assignment]  # some packages keep lists

        def forward(self, x: Tensor) -> None:
            for layer in (self.one, self.same, self.other):
                layer(x)

    found = collect_grams(Block(), [images(3)])
    assert found["one"] is found["same"]
    assert found["other"] is not found["one"]
