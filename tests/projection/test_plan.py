"""Estimates of the cost of an update."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sgp
from sgp.projection.collect import collect_inputs
from sgp.projection.gram import InputGram


class Attention(nn.Module):
    """An embedding, and query and key layers that read the same sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 16)
        self.query = nn.Linear(16, 8)
        self.key = nn.Linear(16, 8)
        self.conv = nn.Conv1d(8, 4, 3, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        return self.conv((self.query(x) * self.key(x)).transpose(1, 2))


def test_a_batch_shows_rows_and_shared_matrices() -> None:
    memory = sgp.GradientMemory(Attention(), threshold=0.9)
    plan = memory.plan(200, torch.zeros(5, 12, dtype=torch.int64))
    found = {tuple(layer.layers): (layer.rows, layer.dimension, layer.bytes) for layer in plan.layers}
    assert found == {
        ("words",): (2400, 100, 800),
        ("query", "key"): (2400, 17, 8 * 17**2),
        ("conv",): (2000, 24, 8 * 24**2),
    }
    assert plan.bytes == 800 + 8 * 17**2 + 8 * 24**2
    assert plan.passes == 1
    assert plan.seconds is not None
    assert plan.seconds > 0
    assert "query, key" in str(plan)
    assert memory.tasks == 0


def test_without_a_batch_one_row_per_sample_is_counted() -> None:
    memory = sgp.GradientMemory(nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 4)), threshold=0.9)
    first, second = memory.plan(20).layers
    assert (first.rows, first.bytes, first.flops) == (20, 4 * 20 * 65, 0)
    assert (second.rows, second.bytes, second.flops) == (20, 8 * 9**2, 2 * 20 * 9**2)


def test_a_small_budget_takes_more_passes_and_fewer_bytes() -> None:
    memory = sgp.GradientMemory(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), threshold=0.9)
    one, two = memory.plan(1000), memory.plan(1000, budget=50_000)
    assert (one.passes, two.passes) == (1, 2)
    assert one.bytes == 2 * two.bytes


def test_a_batch_is_run_in_the_passes_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def watched(*args: Any, **kwargs: Any) -> dict[str, InputGram]:
        found = collect_inputs(*args, **kwargs)
        sizes.append(sum(gram.nbytes for gram in {id(s): s for s in found.values()}.values()))
        return found

    monkeypatch.setattr("sgp.projection.plan.collect_inputs", watched)
    memory = sgp.GradientMemory(Attention(), threshold=0.9)
    plan = memory.plan(200, torch.zeros(5, 12, dtype=torch.int64), budget=4000)
    assert plan.passes == len(sizes) == 3
    assert max(sizes) == plan.bytes == 8 * 24**2
    # Query and key read the same input, but not in the same pass.
    assert [layer.layers for layer in plan.layers] == [["words"], ["query"], ["key"], ["conv"]]
    assert [layer.rows for layer in plan.layers] == [2400, 2400, 2400, 2000]


def test_each_pass_takes_the_time_of_its_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def timed(model: nn.Module, batches: list[Any], layers: list[Any], **kwargs: Any) -> dict[str, InputGram]:
        clock[0] += len(layers)  # one second per layer
        return {}

    monkeypatch.setattr("sgp.projection.plan.collect_inputs", timed)
    monkeypatch.setattr("sgp.projection.plan.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("sgp.projection.plan._measure_speeds", lambda: (1e30, 1e30))
    memory = sgp.GradientMemory(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), threshold=0.9)
    for budget, passes in ((2**30, 1), (1, 2)):
        plan = memory.plan({"0": 20, "1": 20}, torch.zeros(10, 8), budget=budget)
        assert plan.passes == passes
        assert plan.seconds == pytest.approx(2 * 20 / 10)


def test_a_wide_layer_takes_half_a_matrix_in_float32() -> None:
    model = nn.Linear(1024, 16, bias=False)
    plans = {gram: sgp.GradientMemory(model, threshold=0.9, gram=gram).plan(5000) for gram in ("float64", "auto")}
    assert plans["float64"].bytes == 8 * 1024**2
    assert plans["auto"].bytes == 4 * 1024 * (1024 + 256) < plans["float64"].bytes
    assert [layer.path for layer in plans["auto"].layers] == ["float32"]
    few = sgp.GradientMemory(model, threshold=0.9).plan(1000).layers[0]
    assert (few.bytes, few.flops) == (4 * 1000 * 1024, 0)


def test_a_model_on_the_meta_device_is_planned_without_values() -> None:
    tokens = torch.zeros(5, 12, dtype=torch.int64)
    expected = sgp.GradientMemory(Attention(), threshold=0.9).plan(200, tokens)
    with torch.device("meta"):
        model = Attention()
    plan = sgp.GradientMemory(model, threshold=0.9).plan(200, tokens.to("meta"))
    assert plan.seconds is None
    assert plan.layers == expected.layers
    assert plan.bytes == expected.bytes
    assert str(plan).splitlines()[0].startswith("at most 7.7 kB in 1 pass (7.7 kB in all), ")


def test_a_mask_on_the_meta_device_admits_all_positions() -> None:
    with torch.device("meta"):
        model, tokens, mask = Attention(), torch.zeros(5, 12, dtype=torch.int64), torch.ones(5, 12)
    plan = sgp.GradientMemory(model, threshold=0.9).plan(200, tokens, mask=lambda batch: mask)
    assert [layer.rows for layer in plan.layers] == [2400, 2400, 2000]


def test_layers_whose_names_differ_in_numbers_only_are_one_line() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 2))
    lines = str(sgp.GradientMemory(model, threshold=0.9).plan(100)).splitlines()
    assert len(lines) == 3
    assert lines[2].split()[0] == "6"
    assert lines[2].endswith("  *")


def test_more_samples_take_more_time() -> None:
    memory = sgp.GradientMemory(nn.Linear(256, 8), threshold=0.9)
    few, many = memory.plan(1_000).seconds, memory.plan(10_000_000).seconds
    assert few is not None
    assert many is not None
    assert many > 10 * few


def test_a_layer_without_a_number_of_samples_is_named() -> None:
    memory = sgp.GradientMemory(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), threshold=0.9)
    with pytest.raises(ValueError, match="layer '1'"):
        memory.plan({"0": 10})


def test_project_removes_the_blocked_part_only() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2, bias=False))
    memory = sgp.GradientMemory(model, threshold=1.0, alpha=float("inf"))
    change, bias = torch.randn(3, 5), torch.randn(3)
    same = memory.project(change, "0", bias)
    assert torch.equal(same[0], change)
    assert torch.equal(same[1], bias)
    data = torch.randn(2, 5)
    memory.update([data])
    found = memory.project(change, "0", bias)
    torch.testing.assert_close(data @ found[0].mT + found[1], torch.zeros(2, 3), atol=1e-5, rtol=0)
    assert float((found[0] - change).norm()) > 0.1
    twice = memory.project(found[0], "0", found[1])
    torch.testing.assert_close(twice[0], found[0], atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="pass bias="):
        memory.project(change, "0")
    with pytest.raises(ValueError, match="leave out bias="):
        memory.project(torch.zeros(2, 3), "1", torch.zeros(2))
    with pytest.raises(ValueError, match=r"shape \(2, 2\), layer '1' has \(2, 3\)"):
        memory.project(torch.zeros(2, 2), "1")
    with pytest.raises(ValueError, match="no layer '2' is protected; the nearest names are"):
        memory.project(change, "2")
