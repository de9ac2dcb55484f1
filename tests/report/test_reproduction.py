"""Runs beside the paper's tables: which runs count for a cell, what is computed, and what is missing."""

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="the paper's numbers are a YAML file; of the extra 'benchmarks'")

from report.run_folders import make_rows, write_run

from sgp.experiments.config import configure
from sgp.paper import Cell, find_cell, find_cells
from sgp.report.reproduction import (
    Outcome,
    Reproduction,
    estimate_seconds,
    find_expected_settings,
    find_missing,
    find_records,
    make_grid,
    reproduce,
)


def get_cell(benchmark: str, method: str) -> Cell:
    cell = find_cell(benchmark, method)
    assert cell is not None
    return cell


CIFAR_SGP = get_cell("split-cifar100", "sgp")
SUPERCLASS_GPM = get_cell("cifar100-superclass", "gpm")


def write_cell_run(
    place: Path, cell: Cell, name: str, *, acc: float = 76.0, loss: float = 1.0, seconds: float = 60.0, **changes: Any
) -> Path:
    """Return the folder of a new run of a cell's full protocol, with some settings changed."""
    settings = {"preset": cell.comparison.preset, **cell.comparison.settings, **changes}
    config = configure(cell.benchmark, cell.method, **settings)
    tasks = config.flat()["tasks"]
    # Tasks that are learned alike and lose as much with every task end `loss * (tasks - 1) / 2` lower in the mean.
    return write_run(place / name, config, make_rows(tasks, acc + loss * (tasks - 1) / 2, loss), seconds=seconds)


def compare(place: Path, cell: Cell) -> Outcome:
    records, left_out = find_records([place])
    assert left_out == []
    (outcome,) = reproduce(records, [cell]).outcomes
    return outcome


def test_every_cell_has_expected_settings() -> None:
    for cell in find_cells():
        settings = find_expected_settings(cell.benchmark, cell.method)
        assert (settings["benchmark"], settings["method"]) == (cell.benchmark, cell.method)
        assert cell.comparison.settings.items() <= settings.items()


def test_a_cell_without_runs_is_not_run(tmp_path: Path) -> None:
    outcome = compare(tmp_path, CIFAR_SGP)
    assert (outcome.status, outcome.acc, outcome.acc_z, outcome.bwt_z) == ("not run", None, None, None)


def test_runs_of_other_seeds_are_averaged_and_compared(tmp_path: Path) -> None:
    for seed, acc in enumerate((75.0, 77.0, 79.0)):
        write_cell_run(
            tmp_path, CIFAR_SGP, f"run{seed}", acc=acc, loss=0.2, seed=seed, threads=seed, channels_last=seed > 1
        )
    outcome = compare(tmp_path, CIFAR_SGP)
    assert (len(outcome.runs), outcome.differences) == (3, ())
    assert outcome.acc == pytest.approx(77.0)
    assert outcome.acc_z == pytest.approx((77.0 - 76.05) / (0.43 * math.sqrt(4 / 3)))
    assert outcome.bwt == pytest.approx(-1.0)
    assert outcome.bwt_z == pytest.approx(0.0)
    assert outcome.status == "agrees"


@pytest.mark.parametrize(("acc", "loss", "status"), [(76.9, 0.2, "agrees"), (77.5, 0.2, "off"), (76.0, 1.0, "off")])
def test_a_cell_is_off_if_z_of_acc_or_bwt_exceeds_two(tmp_path: Path, acc: float, loss: float, status: str) -> None:
    write_cell_run(tmp_path, CIFAR_SGP, "run", acc=acc, loss=loss)
    assert compare(tmp_path, CIFAR_SGP).status == status


def test_a_spread_of_bwt_that_was_rounded_to_zero_counts_as_half_of_the_last_digit(tmp_path: Path) -> None:
    write_cell_run(tmp_path, CIFAR_SGP, "run", loss=0.4)
    outcome = compare(tmp_path, CIFAR_SGP)
    assert CIFAR_SGP.numbers["bwt_std"] == 0.0
    assert outcome.bwt == pytest.approx(-2.0)
    assert outcome.bwt_z == pytest.approx((-2.0 + 1.0) / (0.5 * math.sqrt(2)))


def test_without_any_spread_nothing_is_judged(tmp_path: Path) -> None:
    write_cell_run(tmp_path, CIFAR_SGP, "run")
    cell = Cell("split-cifar100", "sgp", "table1", "seed", CIFAR_SGP.comparison, {"acc": 76.0}, None)
    outcome = compare(tmp_path, cell)
    assert (outcome.acc_z, outcome.status) == (None, "no spread")


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({"tasks": 3}, ("3 of 10 tasks",)),
        ({"epochs": 5}, ("5 of 200 epochs",)),
        ({"samples": 100}, ("100 samples",)),
        ({"alpha": 5}, ("alpha 5.0",)),
        ({"norm_statistics": "stored"}, ("norm_statistics stored",)),
        ({"validation_seed": 0}, ("validation_seed 0",)),
        ({"preset": "reference"}, ("preset reference",)),
        ({"preset": "corrected", "alpha": 5}, ("preset corrected", "alpha 5.0")),
        ({"recipe": "fast"}, ("20 of 200 epochs", "recipe fast")),
        ({"network": "lenet"}, ("network lenet",)),
    ],
    ids=str,
)
def test_a_run_of_other_settings_does_not_count_and_is_named(
    tmp_path: Path, changes: dict[str, Any], differences: tuple[str, ...]
) -> None:
    write_cell_run(tmp_path, CIFAR_SGP, "run", **changes)
    outcome = compare(tmp_path, CIFAR_SGP)
    assert (outcome.status, outcome.differences) == ("partial", differences)
    assert (outcome.acc_z, outcome.bwt_z) == (None, None)


@pytest.mark.parametrize("changes", [{"pixels": "true"}, {"validation_seed": None}, {"preset": "paper"}], ids=str)
def test_a_run_on_other_superclass_data_does_not_count(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_cell_run(tmp_path, SUPERCLASS_GPM, "run", **changes)
    assert compare(tmp_path, SUPERCLASS_GPM).status == "partial"


def test_a_run_counts_whatever_its_settings_are_called(tmp_path: Path) -> None:
    cell = get_cell("cifar100-superclass", "stl")
    assert cell.comparison.preset == "paper"
    write_cell_run(tmp_path, cell, "run", preset="reference", acc=61.0)
    assert compare(tmp_path, cell).status == "agrees"


def test_a_run_with_a_setting_that_is_unknown_now_does_not_count(tmp_path: Path) -> None:
    path = write_cell_run(tmp_path, CIFAR_SGP, "run")
    (path / "config.yaml").write_text((path / "config.yaml").read_text() + "project_again: 0.2\n")
    records, left_out = find_records([tmp_path])
    assert records == []
    assert [folder for folder, _ in left_out] == [path]
    assert "project_again" in left_out[0][1]


def test_a_run_of_another_method_or_benchmark_does_not_count(tmp_path: Path) -> None:
    write_cell_run(tmp_path, get_cell("split-cifar100", "gpm"), "gpm")
    write_cell_run(tmp_path, get_cell("split-miniimagenet", "sgp"), "mini")
    assert compare(tmp_path, CIFAR_SGP).status == "not run"


def test_the_same_run_counts_once(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_cell_run(tmp_path, CIFAR_SGP, name, seed=3)
    assert len(compare(tmp_path, CIFAR_SGP).runs) == 1


def test_full_runs_go_before_partial_ones_and_longer_partial_ones_before_shorter(tmp_path: Path) -> None:
    write_cell_run(tmp_path, CIFAR_SGP, "fast", recipe="fast")
    write_cell_run(tmp_path, CIFAR_SGP, "short", epochs=5)
    write_cell_run(tmp_path, CIFAR_SGP, "few", tasks=3)
    assert compare(tmp_path, CIFAR_SGP).differences == ("3 of 10 tasks",)
    write_cell_run(tmp_path, CIFAR_SGP, "full")
    assert [run.path.name for run in compare(tmp_path, CIFAR_SGP).runs] == ["full"]


def test_unfinished_and_damaged_runs_are_left_out_with_a_reason(tmp_path: Path) -> None:
    config = configure("split-cifar100", "sgp")
    write_run(tmp_path / "unfinished", config, make_rows(2), end=False)
    damaged = write_cell_run(tmp_path, CIFAR_SGP, "damaged")
    (damaged / "metrics.jsonl").write_text("{}\n")
    unreadable = write_cell_run(tmp_path, CIFAR_SGP, "unreadable")
    (unreadable / "config.yaml").write_bytes(b"\xff")
    records, left_out = find_records([tmp_path])
    assert records == []
    reasons = {path.name: reason for path, reason in left_out}
    assert reasons["unfinished"] == "not finished: 2 tasks learned so far"
    assert reasons["damaged"].endswith("is damaged in line 1")
    assert reasons["unreadable"].startswith("cannot be read")


def test_runs_on_other_benchmarks_are_not_read(tmp_path: Path) -> None:
    path = write_cell_run(tmp_path, CIFAR_SGP, "run")
    (path / "config.yaml").write_text("benchmark: digits\nmethod: nothing like it\n")
    assert find_records([tmp_path]) == ([], [])


def test_a_folder_that_is_given_twice_is_read_once(tmp_path: Path) -> None:
    write_cell_run(tmp_path, CIFAR_SGP, "run")
    records, _ = find_records([tmp_path, tmp_path / "run", tmp_path / ".." / tmp_path.name])
    assert len(records) == 1


def test_times_are_relative_to_gpm_of_the_full_protocol(tmp_path: Path) -> None:
    cells = [get_cell("split-cifar100", method) for method in ("gpm", "sgp", "trgp")]
    for cell, seconds in zip(cells[:2], (100.0, 120.0), strict=True):
        write_cell_run(tmp_path, cell, cell.method, seconds=seconds)
    write_cell_run(tmp_path, cells[2], "trgp", tasks=3)
    reproduction = reproduce(find_records([tmp_path])[0], cells)
    ratios = [reproduction.compute_time_ratio(outcome) for outcome in reproduction.outcomes]
    assert ratios == [1.0, pytest.approx(1.2), None]
    without = Reproduction(reproduction.outcomes[1:])
    assert without.compute_time_ratio(without.outcomes[0]) is None


@pytest.mark.parametrize(
    ("seeds", "count", "missing"),
    [([], 2, [0, 1]), ([3], 1, []), ([3], 2, [0]), ([0, 2], 4, [1, 3]), ([0, 1, 2], 2, [])],
)
def test_missing_seeds_are_the_smallest_that_no_run_has(
    tmp_path: Path, seeds: list[int], count: int, missing: list[int]
) -> None:
    for seed in seeds:
        write_cell_run(tmp_path, CIFAR_SGP, f"run{seed}", seed=seed)
    assert find_missing(compare(tmp_path, CIFAR_SGP), count) == missing


def test_partial_runs_do_not_count_as_done(tmp_path: Path) -> None:
    write_cell_run(tmp_path, CIFAR_SGP, "run", tasks=3)
    assert find_missing(compare(tmp_path, CIFAR_SGP), 1) == [0]


def test_superclass_is_repeated_over_task_orders(tmp_path: Path) -> None:
    write_cell_run(tmp_path, SUPERCLASS_GPM, "run", order=1)
    outcome = compare(tmp_path, SUPERCLASS_GPM)
    assert find_missing(outcome, 3) == [0, 2]
    grid = {"benchmark": "cifar100-superclass", "method": "gpm", "preset": "reference", "order": [0, 2]}
    assert make_grid(outcome, [0, 2]) == grid


def test_a_grid_names_the_settings_that_its_preset_does_not_have() -> None:
    outcome = Outcome(get_cell("cifar100-superclass", "stl"), ())
    assert make_grid(outcome, [0]) == {
        "benchmark": "cifar100-superclass",
        "method": "stl",
        "preset": "paper",
        "order": [0],
        "pixels": ["scrambled"],
        "validation_seed": [0],
    }


def test_time_is_estimated_from_the_nearest_runs(tmp_path: Path) -> None:
    cells = {method: get_cell("split-cifar100", method) for method in ("gpm", "sgp", "trgp", "multitask")}
    write_cell_run(tmp_path, cells["gpm"], "gpm", seconds=100.0)
    write_cell_run(tmp_path, cells["sgp"], "sgp", tasks=5, epochs=20, seconds=10.0)
    reproduction = reproduce(find_records([tmp_path])[0], cells.values())
    estimates = {each.cell.method: estimate_seconds(reproduction, each) for each in reproduction.outcomes}
    assert estimates["gpm"] == (pytest.approx(100.0), "from 1 of the same settings")
    assert estimates["sgp"] == (pytest.approx(200.0), "at most, scaled from 5 of 10 tasks, 20 of 200 epochs")
    assert estimates["trgp"] is not None
    assert estimates["trgp"][0] == pytest.approx(165.0)
    assert estimates["trgp"][1].startswith("1.65 times gpm's, as in the paper")
    assert estimates["multitask"] is None
