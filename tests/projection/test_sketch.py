"""Float32 Gram matrices and sketches of wide layers, against float64 truth."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sgp
from sgp.projection import sketch
from sgp.projection.gram import GramPath, InputGram
from sgp.projection.scan import ScanRules, scan_model
from sgp.projection.sketch import TriangularGram, WideGram, find_leading, orthonormalize
from sgp.projection.subspace import Subspace, UncertifiedError
from sgp.projection.update import choose_path

D = 256


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 128 rows of 256 dimensions decide, as 2,048 rows of 4,096 do."""
    monkeypatch.setattr(sketch, "LEAST_BUFFER", 32)
    monkeypatch.setattr(sketch, "ROWS_PER_PRODUCT", 32)


def draw_power_law(rows: int, exponent: float, seed: int = 0) -> Tensor:
    """Return rows whose singular values fall off as a power of their number, [rows, D]."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(D, D, generator=generator)).Q
    return (torch.randn(rows, D, generator=generator) * torch.arange(1, D + 1).float() ** -exponent) @ turn


def draw_sorted(rows: int, exponent: float, seed: int = 0) -> Tensor:
    """Return the rows of four classes one after another, each with directions of its own."""
    return torch.cat([draw_power_law(rows // 4, exponent, 10 * seed + label) for label in range(4)])


def draw_late(rows: int, exponent: float, seed: int = 0) -> Tensor:
    """Return rows of which the last twentieth has a hundred directions that no earlier row has."""
    data = draw_power_law(rows, exponent, seed)
    generator = torch.Generator().manual_seed(seed)
    last = len(data) // 20
    late = torch.linalg.qr(torch.randn(D, 100, generator=generator)).Q
    data[-last:] = data.norm(dim=1).max() * torch.randn(last, 100, generator=generator) / 5 @ late.mT
    return data


def grow(data: Tensor, threshold: float, old: Subspace | None = None, **options: Any) -> tuple[Subspace, WideGram]:
    old = old or Subspace.empty(1, data.shape[1])
    gram = WideGram(data.shape[1], threshold, basis=old.basis[0], **options)
    for chunk in torch.split(data, 50):
        gram.add(chunk.unsqueeze(0))
    return old.grow(gram, threshold=threshold, alpha=10), gram


def measure_captured(data: Tensor, bases: Subspace) -> float:
    rows, basis = data.double(), bases.basis[0].double()
    return float((rows @ basis).square().sum() / rows.square().sum())


def count_fewest(data: Tensor, threshold: float, old: Subspace | None = None) -> int:
    """Return the rank that the float64 path takes."""
    old = old or Subspace.empty(1, data.shape[1])
    gram = InputGram(1, data.shape[1], precise=True)
    gram.add(data.float().unsqueeze(0))
    return int(old.grow(gram, threshold=threshold, alpha=10).rank)


@pytest.mark.parametrize("can_sketch", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threshold", [0.9, 0.95, 0.99])
@pytest.mark.parametrize("exponent", [0.4, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("draw", [draw_power_law, draw_sorted, draw_late])
def test_bases_capture_what_is_certified_or_there_is_an_error(
    draw: Callable[..., Tensor], exponent: float, threshold: float, dtype: torch.dtype, can_sketch: bool
) -> None:
    torch.manual_seed(0)
    old: Subspace | None = None
    for seed in (1, 2):
        data = draw(2000, exponent, seed).to(dtype)
        try:
            grown, gram = grow(data, threshold, old, can_sketch=can_sketch)
        except UncertifiedError:
            assert can_sketch
            grown, gram = grow(data, threshold, old)
        truth = measure_captured(data, grown)
        assert truth >= threshold
        assert gram.captured is not None
        assert threshold - 1e-12 <= gram.captured <= truth
        basis = grown.basis[0].double()
        assert float((basis.mT @ basis - torch.eye(basis.shape[1])).abs().max()) < 1e-6
        old = grown


@pytest.mark.parametrize("can_sketch", [False, True])
@pytest.mark.parametrize("exponent", [0.7, 1.0, 2.0])
def test_shuffled_data_take_at_most_a_tenth_more_bases_than_the_fewest(exponent: float, can_sketch: bool) -> None:
    first, second = draw_power_law(2000, exponent, 1), draw_power_law(2000, exponent, 2)
    grown, gram = grow(first, 0.95, can_sketch=can_sketch)
    assert gram.kind == ("sketch" if can_sketch and exponent >= 1 else "float32")
    assert int(grown.rank) <= math.ceil(1.1 * count_fewest(first, 0.95))
    again, _ = grow(second, 0.95, grown, can_sketch=can_sketch)
    assert int(again.rank) <= math.ceil(1.1 * count_fewest(second, 0.95, grown))


def test_a_direction_that_appears_in_the_last_rows_fails_the_certificate() -> None:
    with pytest.raises(UncertifiedError, match=r"certifies .* below the threshold of 95\.0000%.*float32"):
        grow(draw_late(2000, 2.0), 0.95, can_sketch=True)


def test_a_sketch_is_widened_for_later_directions_and_stays_a_lower_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch, "WIDEST", 0.6)
    few = draw_power_law(200, 2.0)
    later = torch.cat([few, draw_power_law(1800, 0.9, 3)])
    _, narrow = grow(few, 0.95, can_sketch=True)
    grown, wide = grow(later, 0.95, can_sketch=True)
    assert narrow.sketch_shape is not None
    assert wide.sketch_shape is not None
    assert wide.sketch_shape[1] > narrow.sketch_shape[1]
    assert wide.captured is not None
    assert 0.95 <= wide.captured <= measure_captured(later, grown)


def test_energies_of_a_sketch_never_exceed_those_of_its_directions() -> None:
    data = draw_power_law(2000, 1.0)
    old, _ = grow(draw_power_law(2000, 1.5, 4), 0.95)
    gram = WideGram(D, 0.95, basis=old.basis[0], can_sketch=True)
    gram.add(data.unsqueeze(0))
    spectrum = gram.decompose(old.basis.double(), old.rank, 0.95)
    width = int((spectrum.energies > 1e-4 * spectrum.total).sum())
    directions = spectrum.find_directions(width)[0]
    truth = (data.double() @ directions).square().sum(0)
    assert (spectrum.energies[0, :width] <= truth + sketch.ROUNDING * spectrum.total).all()
    torch.testing.assert_close(spectrum.surrogate[0], (data.double() @ old.basis[0].double()).square().sum(0))


def test_a_constant_input_is_one_more_column() -> None:
    data = draw_power_law(2000, 1.0) + 0.3
    joint = torch.cat([data, torch.ones(2000, 1)], dim=1)
    for can_sketch in (False, True):
        gram = WideGram(D, 0.95, constant=True, can_sketch=can_sketch)
        for chunk in torch.split(data, 70):
            gram.add(chunk.unsqueeze(0))
        grown = Subspace.empty(1, D + 1).grow(gram, threshold=0.95, alpha=10)
        assert measure_captured(joint, grown) >= 0.95
        assert gram.kind == ("sketch" if can_sketch else "float32")


def test_few_rows_are_decomposed_as_in_float64() -> None:
    data = draw_power_law(100, 0.7)
    exact = InputGram(1, D)
    exact.add(data.unsqueeze(0))
    expected = Subspace.empty(1, D).grow(exact, threshold=0.95, alpha=10)
    grown, gram = grow(data, 0.95, can_sketch=True)
    assert gram.kind == "float64"
    assert torch.equal(grown.basis, expected.basis)
    assert torch.equal(grown.importance, expected.importance)


@pytest.mark.parametrize("can_sketch", [False, True])
def test_a_clone_is_independent(can_sketch: bool) -> None:
    data = draw_power_law(600, 2.0)
    gram = WideGram(D, 0.95, can_sketch=can_sketch)
    gram.add(data[:300].unsqueeze(0))
    copy = gram.clone()
    copy.add(data[300:].unsqueeze(0))
    assert (gram.count, copy.count) == (300, 600)
    bases = Subspace.empty(1, D).grow(gram, threshold=0.95, alpha=10)
    expected, _ = grow(data[:300], 0.95, can_sketch=can_sketch)
    assert abs(int(bases.rank) - int(expected.rank)) <= 1
    assert measure_captured(data[:300], bases) >= 0.95


def test_what_is_stored_is_half_a_matrix_or_two_tall_ones() -> None:
    gram = TriangularGram(4096, torch.device("cpu"))
    assert gram.nbytes <= 4 * 4096 * (4096 + sketch.STRIP) / 2
    _, narrow = grow(draw_power_law(2000, 2.0), 0.95, can_sketch=True)
    assert narrow.sketch_shape is not None
    assert narrow.nbytes <= 8 * D * narrow.sketch_shape[1] + 4 * D * sketch.ROWS_PER_PRODUCT


def test_strips_make_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch, "STRIP", 7)
    gram, rows, columns = TriangularGram(30, torch.device("cpu")), torch.randn(50, 30), torch.randn(30, 4)
    gram.add_(rows)
    torch.testing.assert_close(gram.to_dense(), rows.mT @ rows)
    torch.testing.assert_close(gram.multiply(columns), rows.mT @ rows @ columns)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e20])
def test_rows_that_cannot_be_squared_are_refused(bad: float) -> None:
    gram = WideGram(4, 0.95)
    with pytest.raises(FloatingPointError):
        gram.add(torch.full((1, 9, 4), bad))
    assert gram.count == 0


def test_inputs_that_are_all_zero_need_no_bases() -> None:
    for can_sketch in (False, True):
        grown, _ = grow(torch.zeros(500, D), 0.95, can_sketch=can_sketch)
        assert int(grown.rank) == 0


def test_subspace_iteration_gives_up_where_too_many_directions_are_needed() -> None:
    matrix = torch.eye(64)
    cpu = torch.device("cpu")
    assert find_leading(lambda columns: matrix @ columns, 64, 64.0, 20.0, sketch.THOROUGH, cpu) is None
    found = find_leading(lambda columns: matrix @ columns, 64, 64.0, 50.0, sketch.THOROUGH, cpu)
    assert found is not None
    values, columns = found
    assert float(values.sum()) >= 14
    torch.testing.assert_close(columns.mT @ columns, torch.eye(columns.shape[1]), atol=1e-5, rtol=0)


def test_dependent_columns_are_made_orthonormal_too() -> None:
    column = torch.randn(20, 1)
    found = orthonormalize(torch.cat([column, column], dim=1), torch.zeros(20, 0))
    torch.testing.assert_close(found.mT @ found, torch.eye(2, dtype=torch.float64))


def test_bases_that_the_sketch_was_not_taken_beside_are_refused() -> None:
    gram = WideGram(D, 0.95, can_sketch=True)
    gram.add(draw_power_law(500, 2.0).unsqueeze(0))
    old, _ = grow(draw_power_law(500, 2.0, 5), 0.95)
    with pytest.raises(ValueError, match="beside 0 bases"):
        old.grow(gram, threshold=0.95, alpha=10)


def test_a_rule_that_needs_all_energies_is_refused_beside_a_part_of_them() -> None:
    gram = WideGram(D, 0.95, can_sketch=True)
    gram.add(draw_power_law(500, 2.0).unsqueeze(0))
    with pytest.raises(ValueError, match="gram='float64'"):
        Subspace.empty(1, D).grow(
            gram, threshold=0.95, alpha=10, choose=lambda old, new, total, threshold: torch.ones(1, dtype=torch.int64)
        )


@pytest.mark.parametrize(
    ("gram", "module", "threshold", "kind"),
    [
        ("auto", nn.Linear(512, 2, bias=False), 0.95, "float64"),
        ("auto", nn.Linear(513, 2, bias=False), 0.95, "float32"),
        ("auto", nn.Linear(2047, 2, bias=False), 0.95, "float32"),
        ("auto", nn.Linear(2048, 2, bias=False), 0.95, "sketch"),
        ("auto", nn.Linear(2048, 2, bias=False), 0.9991, "float64"),
        ("auto", nn.Linear(2048, 2, dtype=torch.float64), 0.95, "float64"),
        ("auto", nn.Conv2d(2048, 2048, 3, groups=2), 0.95, "float64"),
        ("auto", nn.Embedding(3000, 4), 0.95, "float64"),
        ("float64", nn.Linear(4096, 2), 0.95, "float64"),
        ("float32", nn.Linear(4096, 2), 0.95, "float32"),
        ("float32", nn.Linear(8, 2), 0.95, "float32"),
        ("sketch", nn.Linear(8, 2), 0.95, "sketch"),
        ("sketch", nn.Linear(8, 2), 0.9991, "float64"),
    ],
)
def test_the_path_depends_on_settings_and_shapes(gram: Any, module: nn.Module, threshold: float, kind: str) -> None:
    (layer,) = scan_model(module, ScanRules()).layers.values()
    assert choose_path(gram, layer, threshold, can_repeat=True).kind == kind
    once = choose_path(gram, layer, threshold, can_repeat=False).kind
    assert once == ("float32" if kind == "sketch" else kind)


class TwoReaders(nn.Module):
    """Two layers that read the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(D, 4), nn.Linear(D, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.query(x) * self.key(x)


def make_memory(gram: str, **options: Any) -> sgp.GradientMemory:
    torch.manual_seed(0)
    settings: Any = {"threshold": 0.95, "gram": gram} | options
    return sgp.GradientMemory(TwoReaders(), **settings)


def test_a_failed_certificate_leads_to_another_pass_in_float32() -> None:
    memory, data = make_memory("sketch"), draw_late(2000, 2.0)
    report = memory.update(list(data.split(100)))
    (layer,) = report.layers
    assert (layer.path, layer.passes, layer.layers) == ("float32", 2, ["query", "key"])
    assert memory.subspaces["query"] is memory.subspaces["key"]
    joint = torch.cat([data, torch.ones(2000, 1)], dim=1)
    subspace = memory.subspaces["query"]
    assert isinstance(subspace, Subspace)
    assert measure_captured(joint, subspace) >= 0.95
    assert layer.captured == pytest.approx(measure_captured(joint, subspace), abs=1e-5)


def test_an_iterator_is_collected_in_float32() -> None:
    memory = make_memory("sketch")
    batches: Iterator[Tensor] = iter(draw_late(2000, 2.0).split(100))
    (layer,) = memory.update(batches).layers
    assert (layer.path, layer.passes) == ("float32", 1)


def test_a_sketch_is_reported_as_a_lower_bound() -> None:
    memory, data = make_memory("sketch"), draw_power_law(2000, 2.0)
    report = memory.update([data])
    (layer,) = report.layers
    assert (layer.path, layer.is_bound, layer.passes, layer.rows) == ("sketch", True, 1, 2000)
    assert layer.bases == layer.added == int(memory.subspaces["query"].rank)
    assert report.bytes == layer.bytes < 8 * D**2
    assert ">= 95." in str(report)
    assert "query, key" in str(report)
    again = memory.update([data])
    assert again.layers[0].added == 0


def test_a_memory_of_another_rule_of_growth_keeps_whole_spectra() -> None:
    class OtherRule(sgp.GradientMemory):
        def grow_bases(self, *args: Any, **options: Any) -> Any:
            return super().grow_bases(*args, **options)

    memory = OtherRule(TwoReaders(), threshold=0.95, gram="sketch")
    assert {layer.path for layer in memory.update([draw_power_law(2000, 2.0)]).layers} == {"float64"}


def test_a_forward_inside_autocast_does_not_weaken_a_basis() -> None:
    data = draw_power_law(2000, 1.0)
    ranks = []
    for enabled in (False, True):
        memory = make_memory("float32")

        def forward(batch: Tensor, model: nn.Module = memory.model, enabled: bool = enabled) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                return model(batch)

        memory.update([data], forward=forward)
        ranks.append(int(memory.subspaces["query"].rank))
    assert ranks[0] == ranks[1]


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="gram must be one of 'auto', 'float64', 'float32', 'sketch'; got 'float16'"):
        make_memory("float16")


def test_a_sketch_shares_between_layers_with_the_same_bases_only() -> None:
    memory = make_memory("sketch", threshold={"query": 0.95, "key": 0.9})
    data = draw_power_law(2000, 2.0)
    assert [layer.layers for layer in memory.update([data]).layers] == [["query"], ["key"]]
    assert GramPath("sketch", 0.9) == GramPath("sketch", 0.9, torch.zeros(1))
