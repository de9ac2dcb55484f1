"""The paper's tables of results, from `results.yaml`: the numbers of each row, and the runs to compare with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal, get_args

from sgp.yaml_file import load_yaml

Preset = Literal["paper", "reference", "corrected"]
PRESETS: tuple[str, ...] = get_args(Preset)
TABLES = ("table1", "table2")


@dataclass(frozen=True)
class Comparison:
    """How to run a method so that its numbers can be compared with the paper's.

    Attributes:
        preset: Preset of the run.
        settings: Settings that the run must have, by name. They override those of the preset.
    """

    preset: Preset = "paper"
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """A method on a benchmark in one of the paper's tables of results.

    Attributes:
        benchmark: Name of the benchmark.
        method: Name of the method.
        table: Table that has the row, "table1" or "table2".
        repeated: Setting that the paper's mean and spread are over, "seed" or "order".
        comparison: How a run must be made.
        numbers: acc and capacity in percent and bwt as a fraction, with acc_std and bwt_std; time relative to GPM's.
        acc_spread: Standard deviation that ACC is compared by, in percent: the row's own, or that of another row of the
            table. None if the table has no spread at all.
    """

    benchmark: str
    method: str
    table: str
    repeated: str
    comparison: Comparison
    numbers: Mapping[str, float]
    acc_spread: float | None


@cache
def find_cells() -> tuple[Cell, ...]:
    """Return every row of the paper's tables of results, in their order."""
    return read_cells(files("sgp.paper").joinpath("results.yaml"))


def find_cell(benchmark: str, method: str) -> Cell | None:
    """Return the row of a method on a benchmark; None if the paper has no such row."""
    return next((cell for cell in find_cells() if (cell.benchmark, cell.method) == (benchmark, method)), None)


def numbers(benchmark: str, method: str) -> dict[str, float]:
    """Return what the paper reports of a method: acc in percent, bwt as a fraction, capacity in percent."""
    cell = find_cell(benchmark, method)
    return {name: value for name, value in cell.numbers.items() if name != "time"} if cell else {}


def times(benchmark: str) -> dict[str, float]:
    """Return the paper's training times on a benchmark, relative to GPM's, by method."""
    return {
        cell.method: cell.numbers["time"]
        for cell in find_cells()
        if cell.benchmark == benchmark and "time" in cell.numbers
    }


def comparison(benchmark: str, method: str) -> Comparison:
    """Return the preset and settings under which a method is compared with the paper.

    A method without a row of its own shares the settings of the benchmark's other rows.
    """
    cell = find_cell(benchmark, method)
    if cell is not None:
        return cell.comparison
    shared = next((cell.comparison.settings for cell in find_cells() if cell.benchmark == benchmark), {})
    return Comparison("paper", shared)


def read_cells(path: Path | Traversable) -> tuple[Cell, ...]:
    """Read the rows of a file of tables of results, in the order of the file."""
    cells = []
    for benchmark, table in load_yaml(path).items():
        rows, shared = table["rows"], table.get("spread_of")
        stand_in = None if shared is None else rows[shared]["acc_std"]
        for method, row in rows.items():
            values = {name: float(value) for name, value in row.items() if name != "preset"}
            how = Comparison(row["preset"], table.get("settings", {}))
            spread = values.get("acc_std", stand_in)
            cells.append(Cell(benchmark, method, table["table"], table["repeated"], how, values, spread))
    return tuple(cells)
