"""The summary: what is protected, how much room is left, and what is not protected."""

import io
import math
import re

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from sgp import GradientMemory
from sgp.projection import Capacity, LayerCapacity
from sgp.projection.capacity import print_table


class Odd(nn.Module):
    """A layer type that nobody has registered."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.kernel


class Network(nn.Module):
    """One of every kind that a summary tells apart."""

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


def memory_of(**settings: object) -> GradientMemory:
    torch.manual_seed(0)
    settings = {"threshold": 0.8, "alpha": 10, "exclude": ["heads.[0-9]*"]} | settings
    return GradientMemory(Network(), **settings)  # type: ignore[arg-type]


def batch() -> Tensor:
    return torch.randn(30, 4, 8, generator=torch.Generator().manual_seed(1))


def printed(memory: GradientMemory) -> list[str]:
    file = io.StringIO()
    memory.summary(Console(width=80, file=file))
    return file.getvalue().splitlines()


def find_local_rows(lines: list[str]) -> dict[str, list[str]]:
    """Layer -> cells of the table; a name that was folded is put together again."""
    start = next(i for i, line in enumerate(lines) if "bases / dim" in line)
    end = next(i for i, line in enumerate(lines) if line.strip().startswith("total"))
    rows: dict[str, list[str]] = {}
    for line in lines[start + 2 : end]:
        name, *cells = re.split(r"\s{2,}", line.strip())
        if cells:
            rows[name] = cells
        elif name:
            last = list(rows)[-1]
            rows[last + name] = rows.pop(last)
    return rows


def section(lines: list[str], title: str) -> dict[str, str]:
    """Parameter -> reason, as listed below a title."""
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


def test_the_table_has_a_row_per_layer_with_the_numbers_of_capacity_in_80_columns() -> None:
    memory = memory_of()
    memory.update([batch()])
    lines = printed(memory)
    assert max(map(len, lines)) <= 80
    assert lines[0].strip() == "GradientMemory after 1 task"
    assert lines[2].split() == ["layer", "bases", "/", "dim", "fully", "blocked", "free", "bytes"]
    rows, capacity = find_local_rows(lines), memory.capacity()
    assert list(rows) == [layer.layer for layer in capacity.layers]
    assert list(rows) == [
        "conv",
        *(f"{ATTENTION}:{part}" for part in ("query", "key", "value", "attended")),
        "hidden",
    ]
    for layer in capacity.layers:
        bases, blocked, free, size = rows[layer.layer]
        assert bases == f"{layer.bases} / {layer.dimension}"
        assert blocked == str(layer.blocked)
        assert free == f"{100 * layer.free:.1f}%"
        assert size == ("shared" if layer.shares else f"{layer.bytes} B")
    total = next(line for line in lines if line.strip().startswith("total"))
    assert total.split() == ["total", str(capacity.bytes), "B"]


def test_capacity_says_what_the_subspaces_are() -> None:
    memory = memory_of()
    memory.update([batch()])
    layers = {layer.layer: layer for layer in memory.capacity().layers}
    conv, subspace = layers["conv"], memory.subspaces["conv"]
    assert conv.dimension == 2 * (2 * 3 + 1)  # two groups, and the constant of the bias
    assert conv.bases == int(subspace.rank.sum())
    assert conv.blocked == int((subspace.importance == 1).sum()) == 2  # the strongest of each group
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


def test_every_parameter_is_either_guarded_or_listed_with_its_reason() -> None:
    memory = memory_of()
    for _ in range(2):
        lines = printed(memory)
        frozen = section(lines, "Frozen after the first task:")
        free = section(lines, "Not protected:")
        assert frozen == {
            "norm.weight": "norm",
            "norm.bias": "norm",
            "odd.kernel": "unsupported layer type Odd",
            "frozen.weight": "not trained (requires_grad is False)",
            "frozen.bias": "not trained (requires_grad is False)",
            "norm.running_mean": "running statistics, norm",
            "norm.running_var": "running statistics, norm",
        }
        assert free == {
            f"heads.{i}.{leaf}": "excluded by 'heads.[0-9]*'" for i in range(2) for leaf in ("weight", "bias")
        }
        capacity = memory.capacity()
        assert capacity.frozen == frozen
        assert capacity.free == free
        guarded = {layer.layer.partition(":")[0] for layer in capacity.layers}
        for name, _ in memory.model.named_parameters():
            owner = name.removesuffix(".out_proj.weight").removesuffix(".out_proj.bias")
            owner = owner if owner != name else name.rpartition(".")[0]
            assert (owner in guarded) != (name in frozen or name in free), name
        memory.update([batch()])


def test_frozen_biases_are_named() -> None:
    memory = memory_of(bias="freeze")
    frozen = section(printed(memory), "Frozen after the first task:")
    biases = {name: why for name, why in frozen.items() if "bias of a guarded layer" in why}
    assert set(biases) == {
        "conv.bias",
        "hidden.bias",
        f"{ATTENTION}.in_proj_bias",
        f"{ATTENTION}.out_proj.bias",
    }
    assert memory.capacity().layers[0].dimension == 2 * 2 * 3


def test_rest_free_lists_norm_layers_and_their_running_statistics_as_drifting() -> None:
    memory = memory_of(rest="free")
    lines = printed(memory)
    free = section(lines, "Not protected: moves freely, so what it does for old tasks drifts:")
    assert {name for name in free if name.startswith("norm.")} == {
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
    }
    assert free["norm.weight"] == "norm"
    assert free["norm.running_var"] == "running statistics, norm"
    assert free["odd.kernel"] == "unsupported layer type Odd"
    assert memory.capacity().free == free
    assert set(section(lines, "Frozen after the first task:")) == {"frozen.weight", "frozen.bias"}


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


def test_names_that_share_one_weight_are_told_with_what_is_done() -> None:
    memory = GradientMemory(Tied(), threshold=0.9)
    memory.update([torch.tensor([[0, 1, 2]])])
    lines = printed(memory)
    assert max(map(len, lines)) <= 80
    start = lines.index("Layers that have one weight, which is projected for the inputs of each:")
    assert [line.rstrip() for line in lines[start + 1 : start + 4]] == [
        "  words, out (met from both sides)",
        "  first_of_two_layers_that_have_a_longer_name,",
        "  second_of_two_layers_that_have_a_longer_name",
    ]
    capacity = memory.capacity()
    long = [f"{which}_of_two_layers_that_have_a_longer_name" for which in ("first", "second")]
    assert capacity.tied == {"words.weight": ["words", "out"], f"{long[0]}.weight": long}
    assert capacity.two_sided == ["words.weight"]
    assert not any("one weight" in line for line in printed(memory_of()))


def test_before_the_first_update_all_room_is_free() -> None:
    memory = memory_of()
    assert printed(memory)[0].strip() == "GradientMemory after 0 tasks"
    for layer in memory.capacity().layers:
        assert (layer.bases, layer.blocked, layer.free, layer.bytes) == (0, 0, 1.0, 0)
        assert layer.dimension > 0


def test_with_alpha_infinite_every_basis_is_blocked() -> None:
    memory = memory_of(alpha=math.inf)
    memory.update([batch()])
    for layer in memory.capacity().layers:
        assert layer.blocked == layer.bases > 0
        assert layer.free == pytest.approx(1 - layer.bases / layer.dimension)


def test_nothing_is_listed_where_everything_is_protected() -> None:
    memory = GradientMemory(nn.Linear(5, 2), threshold=0.9)
    memory.update([torch.randn(20, 5)])
    lines = printed(memory)
    assert not any("Frozen" in line or "Not protected" in line or "shared" in line for line in lines)
    assert list(find_local_rows(lines)) == ["(model)"]


def test_names_are_printed_as_they_are_though_they_look_like_markup() -> None:
    names = nn.ModuleDict({"[bold]": nn.Linear(3, 2), "[red]": nn.LayerNorm(2)})
    memory = GradientMemory(names, threshold=0.9)
    lines = printed(memory)
    assert list(find_local_rows(lines)) == ["[bold]"]
    assert set(section(lines, "Frozen")) == {"[red].weight", "[red].bias"}


def test_large_numbers_are_readable_and_fit() -> None:
    layers = [
        LayerCapacity("a" * 60, 1579, 2049, 12, 0.00049, 999),
        LayerCapacity("b", 123456, 1234567, 123456, 1.0, 1_500),
        LayerCapacity("c", 5, 10, 1, 0.5, 21_560_000),
        LayerCapacity("d", 5, 10, 1, 0.5, 3_200_000_000),
    ]
    file = io.StringIO()
    print_table(Capacity(layers, {}, {}), 20, Console(width=80, file=file))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    rows = find_local_rows(lines)
    assert rows["a" * 60] == ["1579 / 2049", "12", "0.0%", "999 B"]
    assert rows["b"] == ["123456 / 1234567", "123456", "100.0%", "1.5 kB"]
    assert rows["c"][-1] == "21.6 MB"
    assert rows["d"][-1] == "3.2 GB"
