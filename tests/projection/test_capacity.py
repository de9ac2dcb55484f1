"""Capacity and summary: protected layers with their free capacity, and all other parameters."""

import json
import math
import re

import pytest
import torch
from torch import Tensor, nn

from sgp import GradientMemory
from sgp.projection import Capacity, LayerCapacity
from sgp.projection.capacity import Summary

pytestmark = pytest.mark.filterwarnings("ignore:Odd. unknown layer type")


class Odd(nn.Module):
    """A layer of a type that is not registered."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.kernel


class Network(nn.Module):
    """A network with every kind of parameter that a summary distinguishes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 6, 3, groups=2)
        self.norm = nn.BatchNorm1d(6)
        self.attention_with_a_name_that_needs_more_than_one_line = nn.MultiheadAttention(6, 2, batch_first=True)
        self.odd = Odd(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.hidden = nn.Linear(6, 5)
        self.heads = nn.ModuleList(nn.Linear(5, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.conv(x)).mT
        hidden = self.attention_with_a_name_that_needs_more_than_one_line(hidden, hidden, hidden)[0]
        return self.heads[0](self.hidden(self.frozen(self.odd(hidden))).relu())


ATTENTION = "attention_with_a_name_that_needs_more_than_one_line"


def make_memory(**settings: object) -> GradientMemory:
    torch.manual_seed(0)
    settings = {"threshold": 0.8, "alpha": 10, "exclude": ["heads.[0-9]*"]} | settings
    return GradientMemory(Network(), **settings)  # type: ignore[arg-type]


def make_batch() -> Tensor:
    return torch.randn(30, 4, 8, generator=torch.Generator().manual_seed(1))


def print_summary(memory: GradientMemory) -> list[str]:
    return str(memory.summary()).splitlines()


def parse_rows(lines: list[str]) -> dict[str, list[str]]:
    """Return the cells of the table by layer."""
    start = next(i for i, line in enumerate(lines) if "bases / dim" in line)
    end = next(i for i, line in enumerate(lines) if line.strip().startswith("total"))
    rows: dict[str, list[str]] = {}
    for line in lines[start + 2 : end]:
        name, *cells = re.split(r"\s{2,}", line.strip())
        if name:
            rows[name] = cells
    return rows


def parse_reasons(lines: list[str], title: str) -> dict[str, str]:
    """Return the reasons that are listed below a title, by parameter."""
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    found: dict[str, str] = {}
    reason = ""
    for line in lines[start + 1 :]:
        if not line.startswith("  "):
            break
        if not line.startswith("    "):
            reason = line.strip()
        else:
            found |= dict.fromkeys((name for name in re.split(r",\s*", line.strip()) if name), reason)
    return found


def test_the_table_has_a_row_per_layer_with_the_numbers_of_capacity() -> None:
    memory = make_memory()
    memory.update([make_batch()])
    lines = print_summary(memory)
    assert lines[0].strip() == "GradientMemory after 1 task"
    assert lines[2].split() == ["layer", "layers", "bases", "/", "dim", "blocked", "free", "bytes"]
    rows, capacity = parse_rows(lines), memory.capacity()
    assert list(rows) == [layer.layer for layer in capacity.layers]
    assert list(rows) == [
        "conv",
        *(f"{ATTENTION}:{part}" for part in ("query", "key", "value", "attended")),
        "hidden",
    ]
    for layer in capacity.layers:
        count, bases, blocked, free, size = rows[layer.layer]
        assert count == "1"
        assert bases == f"{layer.bases} / {layer.dimension}"
        assert blocked == str(layer.blocked)
        assert free == f"{100 * layer.free:.1f}%"
        assert size == ("shared" if layer.shares else f"{layer.bytes} B")
    total = next(line for line in lines if line.strip().startswith("total"))
    assert total.split() == ["total", str(len(capacity.layers)), str(capacity.bytes), "B"]


def test_capacity_reports_the_subspaces() -> None:
    memory = make_memory()
    memory.update([make_batch()])
    layers = {layer.layer: layer for layer in memory.capacity().layers}
    conv, subspace = layers["conv"], memory.subspaces["conv"]
    assert conv.dimension == 2 * (2 * 3 + 1)  # two groups, and the constant of the bias
    assert conv.bases == int(subspace.rank.sum())
    assert conv.blocked == int((subspace.importance == 1).sum()) == 2  # the first basis of each group
    assert conv.free == pytest.approx(1 - float(subspace.importance.sum()) / 14)
    assert conv.bytes == 4 * subspace.basis.numel() + 4 * subspace.importance.numel() + 8 * 2
    assert 0 < conv.free < 1
    assert layers["hidden"].dimension == 7
    query, key = layers[f"{ATTENTION}:query"], layers[f"{ATTENTION}:key"]
    assert query.shares is None
    assert query.bytes > 0
    assert key.shares == f"{ATTENTION}:query"
    assert key.bytes == 0
    assert (key.bases, key.free) == (query.bases, query.free)
    different = {id(s): s for s in memory.subspaces.values()}
    assert memory.capacity().bytes == sum(s.nbytes for s in different.values())


def test_every_parameter_is_either_protected_or_listed_with_its_reason() -> None:
    memory = make_memory(exclude=["heads.0.*", "heads.1.*"])
    for _ in range(2):
        lines = print_summary(memory)
        frozen = parse_reasons(lines, "Frozen after the first task:")
        free = parse_reasons(lines, "Not protected:")
        assert frozen == {
            "norm.weight": "norm",
            "norm.bias": "norm",
            "odd.kernel": "unknown layer type Odd",
            "norm.running_mean": "norm statistics",
            "norm.running_var": "norm statistics",
        }
        assert free == {
            f"heads.{i}.{leaf}": f"excluded by 'heads.{i}.*'" for i in range(2) for leaf in ("weight", "bias")
        }
        capacity = memory.capacity()
        # Parameters that are not trained are not frozen by the memory, so the summary omits them.
        untrained = dict.fromkeys(("frozen.weight", "frozen.bias"), "not trained (requires_grad is False)")
        assert capacity.frozen == frozen | untrained
        assert capacity.free == free
        protected = {layer.layer.partition(":")[0] for layer in capacity.layers}
        for name, _ in memory.model.named_parameters():
            owner = name.removesuffix(".out_proj.weight").removesuffix(".out_proj.bias")
            owner = owner if owner != name else name.rpartition(".")[0]
            assert (owner in protected) != (name in capacity.frozen or name in free), name
        memory.update([make_batch()])


def test_frozen_biases_are_named() -> None:
    memory = make_memory(bias="freeze")
    frozen = parse_reasons(print_summary(memory), "Frozen after the first task:")
    biases = {name: why for name, why in frozen.items() if "bias of a protected layer" in why}
    assert set(biases) == {
        "conv.bias",
        "hidden.bias",
        f"{ATTENTION}.in_proj_bias",
        f"{ATTENTION}.out_proj.bias",
    }
    assert memory.capacity().layers[0].dimension == 2 * 2 * 3


def test_rest_free_lists_norm_layers_and_their_statistics_as_drifting() -> None:
    memory = make_memory(rest="free", exclude=["heads.0.*", "heads.1.*"])
    lines = print_summary(memory)
    free = parse_reasons(lines, "Not protected: changes freely, so old tasks drift:")
    assert {name for name in free if name.startswith("norm.")} == {
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
    }
    assert free["norm.weight"] == "norm"
    assert free["norm.running_var"] == "norm statistics, norm"
    assert free["odd.kernel"] == "unknown layer type Odd"
    assert memory.capacity().free == free
    assert not any("Frozen" in line for line in lines)


class Tied(nn.Module):
    """An output layer that has the weight of the embedding, and two linear layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
        self.out.weight = self.words.weight
        self.first_of_two_layers_that_have_a_longer_name = nn.Linear(6, 6, bias=False)
        self.second_of_two_layers_that_have_a_longer_name = nn.Linear(6, 6, bias=False)
        self.second_of_two_layers_that_have_a_longer_name.weight = (
            self.first_of_two_layers_that_have_a_longer_name.weight
        )

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.first_of_two_layers_that_have_a_longer_name(self.words(tokens))
        return self.out(self.second_of_two_layers_that_have_a_longer_name(hidden))


def test_layers_that_share_one_weight_are_listed() -> None:
    memory = GradientMemory(Tied(), threshold=0.9)
    memory.update([torch.tensor([[0, 1, 2]])])
    lines = print_summary(memory)
    start = lines.index("Layers that share one weight, which is projected for the inputs of each:")
    assert lines[start + 1 : start + 3] == [
        "  words, out (used from both sides)",
        "  first_of_two_layers_that_have_a_longer_name, second_of_two_layers_that_have_a_longer_name",
    ]
    capacity = memory.capacity()
    long = [f"{which}_of_two_layers_that_have_a_longer_name" for which in ("first", "second")]
    assert capacity.tied == {"words.weight": ["words", "out"], f"{long[0]}.weight": long}
    assert capacity.two_sided == ["words.weight"]
    assert not any("share one weight" in line for line in print_summary(make_memory()))


def test_before_the_first_update_all_capacity_is_free() -> None:
    memory = make_memory()
    assert print_summary(memory)[0].strip() == "GradientMemory after 0 tasks"
    for layer in memory.capacity().layers:
        assert (layer.bases, layer.blocked, layer.free, layer.bytes) == (0, 0, 1.0, 0)
        assert layer.dimension > 0


def test_with_alpha_infinite_every_basis_is_blocked() -> None:
    memory = make_memory(alpha=math.inf)
    memory.update([make_batch()])
    for layer in memory.capacity().layers:
        assert layer.blocked == layer.bases > 0
        assert layer.free == pytest.approx(1 - layer.bases / layer.dimension)


def test_nothing_is_listed_where_everything_is_protected() -> None:
    memory = GradientMemory(nn.Linear(5, 2), threshold=0.9)
    memory.update([torch.randn(20, 5)])
    lines = print_summary(memory)
    assert not any("Frozen" in line or "Not protected" in line or "shared" in line for line in lines)
    assert list(parse_rows(lines)) == ["(model)"]


def test_names_are_printed_as_they_are_though_they_look_like_markup() -> None:
    names = nn.ModuleDict({"[bold]": nn.Linear(3, 2), "[red]": nn.LayerNorm(2)})
    memory = GradientMemory(names, threshold=0.9)
    lines = print_summary(memory)
    assert list(parse_rows(lines)) == ["[bold]"]
    assert set(parse_reasons(lines, "Frozen")) == {"[red].weight", "[red].bias"}


def test_large_numbers_are_readable_and_fit_the_columns() -> None:
    layers = [
        LayerCapacity("a" * 60, 1579, 2049, 12, 0.00049, 999),
        LayerCapacity("b", 123456, 1234567, 123456, 1.0, 1_500),
        LayerCapacity("c", 5, 10, 1, 0.5, 21_560_000),
        LayerCapacity("d", 5, 10, 1, 0.5, 3_200_000_000),
    ]
    lines = str(Summary(Capacity(layers, {}, {}), 20)).splitlines()
    rows = parse_rows(lines)
    assert rows["a" * 60] == ["1", "1579 / 2049", "12", "0.0%", "999 B"]
    assert rows["b"] == ["1", "123456 / 1234567", "123456", "100.0%", "1.5 kB"]
    assert rows["c"][-1] == "21.6 MB"
    assert rows["d"][-1] == "3.2 GB"


def test_layers_whose_names_differ_in_numbers_are_one_row() -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(12)], nn.Linear(6, 4))
    blocks = nn.ModuleDict({"blocks": blocks[:12], "out": blocks[12]})
    memory = GradientMemory(blocks, threshold=0.8)
    memory.update([torch.randn(20, 6)], forward=lambda x: blocks["out"](blocks["blocks"](x)))
    lines = print_summary(memory)
    rows = parse_rows(lines)
    assert list(rows) == ["blocks.*.0", "out"]
    free = [memory.subspaces[f"blocks.{i}.0"].free for i in range(12)]
    assert rows["blocks.*.0"][0] == "12"
    assert rows["blocks.*.0"][3] == f"{min(free):.1%} to {max(free):.1%}"
    assert "    blocks.*.1.weight (12 times), blocks.*.1.bias (12 times)" in lines
    assert max(map(len, lines)) <= 80


def test_a_summary_converts_to_a_dict_of_plain_values() -> None:
    memory = make_memory()
    memory.update([make_batch()])
    found, capacity = memory.summary().to_dict(), memory.capacity()
    assert found["tasks"] == 1
    assert found["bytes"] == capacity.bytes
    assert [layer["layer"] for layer in found["layers"]] == [layer.layer for layer in capacity.layers]
    assert json.loads(json.dumps(found)) == found


def test_long_lists_are_wrapped_between_names() -> None:
    names = [f"block_{letter * 30}.weight" for letter in "abcdef"]
    summary = Summary(Capacity([LayerCapacity("a", 1, 2, 1, 0.5, 8)], dict.fromkeys(names, "norm"), {}), 1)
    lines = str(summary).splitlines()
    assert max(map(len, lines)) <= 80
    assert parse_reasons(lines, "Frozen after the first task:") == dict.fromkeys(names, "norm")
    assert repr(summary) == str(summary)
