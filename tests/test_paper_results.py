"""The paper's tables of results: every number is the paper's."""

from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="the paper's numbers are a YAML file; of the extra 'benchmarks'")

from sgp.experiments.config import configure, is_whole
from sgp.methods import METHODS
from sgp.paper import Comparison, comparison, find_cell, find_cells, numbers, read_cells, times

# Tables 1 and 2, whole, with what the text adds of SGP on Superclass. BWT is a fraction there.
NUMBERS = {
    ("split-cifar100", "multitask"): {"acc": 79.58, "acc_std": 0.54},
    ("split-cifar100", "owm"): {"acc": 50.94, "acc_std": 0.60, "bwt": -0.30, "bwt_std": 0.01},
    ("split-cifar100", "a-gem"): {"acc": 63.98, "acc_std": 1.22, "bwt": -0.15, "bwt_std": 0.02},
    ("split-cifar100", "er"): {"acc": 71.73, "acc_std": 0.63, "bwt": -0.06, "bwt_std": 0.01},
    ("split-cifar100", "ewc"): {"acc": 68.80, "acc_std": 0.88, "bwt": -0.02, "bwt_std": 0.01},
    ("split-cifar100", "hat"): {"acc": 72.06, "acc_std": 0.50, "bwt": 0.00, "bwt_std": 0.00},
    ("split-cifar100", "fs-dgpm"): {"acc": 74.33, "acc_std": 0.31, "bwt": -0.03, "bwt_std": 0.00},
    ("split-cifar100", "trgp"): {"acc": 74.46, "acc_std": 0.32, "bwt": -0.01, "bwt_std": 0.00},
    ("split-cifar100", "gpm"): {"acc": 72.48, "acc_std": 0.40, "bwt": 0.00, "bwt_std": 0.00},
    ("split-cifar100", "sgp"): {"acc": 76.05, "acc_std": 0.43, "bwt": -0.01, "bwt_std": 0.00},
    ("split-miniimagenet", "multitask"): {"acc": 69.46, "acc_std": 0.62},
    ("split-miniimagenet", "a-gem"): {"acc": 57.24, "acc_std": 0.72, "bwt": -0.12, "bwt_std": 0.01},
    ("split-miniimagenet", "er"): {"acc": 58.94, "acc_std": 0.85, "bwt": -0.07, "bwt_std": 0.01},
    ("split-miniimagenet", "ewc"): {"acc": 52.01, "acc_std": 2.53, "bwt": -0.12, "bwt_std": 0.03},
    ("split-miniimagenet", "hat"): {"acc": 59.78, "acc_std": 0.57, "bwt": -0.03, "bwt_std": 0.00},
    ("split-miniimagenet", "trgp"): {"acc": 60.93, "acc_std": 0.94, "bwt": 0.00, "bwt_std": 0.00},
    ("split-miniimagenet", "gpm"): {"acc": 60.41, "acc_std": 0.61, "bwt": 0.00, "bwt_std": 0.00},
    ("split-miniimagenet", "sgp"): {"acc": 62.83, "acc_std": 0.33, "bwt": -0.01, "bwt_std": 0.01},
    ("cifar100-superclass", "stl"): {"acc": 61.00, "capacity": 2000},
    ("cifar100-superclass", "pnn"): {"acc": 50.76, "capacity": 271},
    ("cifar100-superclass", "den"): {"acc": 51.10, "capacity": 191},
    ("cifar100-superclass", "rcl"): {"acc": 51.99, "capacity": 184},
    ("cifar100-superclass", "apd"): {"acc": 56.81, "capacity": 130},
    ("cifar100-superclass", "ewc"): {"acc": 50.26, "capacity": 100},
    ("cifar100-superclass", "fs-dgpm"): {"acc": 58.81, "capacity": 100},
    ("cifar100-superclass", "trgp"): {"acc": 58.25, "capacity": 100},
    ("cifar100-superclass", "gpm"): {"acc": 57.72, "capacity": 100},
    ("cifar100-superclass", "sgp"): {"acc": 59.05, "acc_std": 0.50, "bwt": -0.015, "capacity": 100},
}
# The appendix's table of training times, relative to GPM's.
TIMES = {
    "split-cifar100": {"owm": 2.41, "ewc": 1.76, "hat": 1.62, "a-gem": 3.48, "er": 1.49, "gpm": 1.00, "trgp": 1.65}
    | {"fs-dgpm": 10.25, "sgp": 1.16},
    "split-miniimagenet": {"ewc": 1.22, "hat": 0.91, "a-gem": 1.79, "er": 0.82, "gpm": 1.00, "trgp": 1.78, "sgp": 1.05},
    "cifar100-superclass": {"gpm": 1.00, "trgp": 1.52, "fs-dgpm": 11.03, "sgp": 1.17},
}
# The preset under which each method's row is compared, where it is not `paper`.
COMPARED_UNDER_REFERENCE = {
    "split-cifar100": {"ewc", "hat", "fs-dgpm", "trgp"},
    "cifar100-superclass": {"ewc", "fs-dgpm", "trgp", "gpm", "sgp"},
    "split-miniimagenet": {"trgp"},
}
ROW = "{preset: paper, acc: 70, acc_std: 0.5}"


def test_the_numbers_are_those_of_tables_1_and_2() -> None:
    assert {(cell.benchmark, cell.method): numbers(cell.benchmark, cell.method) for cell in find_cells()} == NUMBERS


@pytest.mark.parametrize("benchmark", TIMES)
def test_the_times_are_those_of_the_appendix(benchmark: str) -> None:
    assert times(benchmark) == TIMES[benchmark]


def test_what_the_paper_does_not_have_has_no_numbers() -> None:
    assert numbers("digits", "sgp") == {}
    assert times("digits") == {}
    assert find_cell("digits", "sgp") is None
    assert comparison("digits", "sgp") == Comparison("paper", {})


@pytest.mark.parametrize(("benchmark", "method"), NUMBERS)
def test_every_row_names_the_preset_under_which_it_is_compared(benchmark: str, method: str) -> None:
    under = "reference" if method in COMPARED_UNDER_REFERENCE[benchmark] else "paper"
    assert comparison(benchmark, method).preset == under


@pytest.mark.parametrize(("benchmark", "method"), NUMBERS)
def test_a_row_can_be_run_as_it_is_compared(benchmark: str, method: str) -> None:
    compared = comparison(benchmark, method)
    config = configure(benchmark, method, compared.preset, **compared.settings)
    flat = config.flat()
    assert method in METHODS
    assert is_whole(config)
    if benchmark == "cifar100-superclass":
        assert (flat["pixels"], flat["validation_seed"]) == ("scrambled", 0)
    if method == "fs-dgpm":
        assert (flat["momentum"], flat["clip"]) == (0.9, 2)


@pytest.mark.parametrize("setting", ["pixels", "validation_seed"])
@pytest.mark.parametrize("method", ["den", "finetune"])
def test_runs_on_other_superclass_data_are_not_compared_with_the_paper(setting: str, method: str) -> None:
    settings = dict(comparison("cifar100-superclass", method).settings)
    assert is_whole(configure("cifar100-superclass", method, **settings))
    del settings[setting]
    assert not is_whole(configure("cifar100-superclass", method, **settings))


def test_a_row_without_a_spread_has_that_of_the_row_that_stands_in() -> None:
    for cell in find_cells():
        assert cell.table in ("table1", "table2")
        assert cell.repeated == ("order" if cell.table == "table2" else "seed")
        assert cell.acc_spread == (0.50 if cell.table == "table2" else cell.numbers["acc_std"])


def test_a_table_is_read_with_what_its_rows_share(tmp_path: Path) -> None:
    path = tmp_path / "results.yaml"
    path.write_text(
        "digits:\n  table: table2\n  repeated: order\n  settings: {tasks: 2}\n  spread_of: sgp\n  rows:\n"
        f"    gpm: {{preset: reference, acc: 50}}\n    sgp: {ROW}\n"
    )
    gpm, sgp = read_cells(path)
    assert (gpm.table, gpm.repeated, gpm.comparison) == ("table2", "order", Comparison("reference", {"tasks": 2}))
    assert (gpm.numbers, gpm.acc_spread) == ({"acc": 50.0}, 0.5)
    assert sgp.numbers == {"acc": 70.0, "acc_std": 0.5}
