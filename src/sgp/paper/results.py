"""The paper's tables of results, from `results.yaml`: the numbers of each row, and the runs to compare with them."""

from __future__ import annotations

import math
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
# Numbers of a row, with the smallest value that each can have.
NUMBERS = {"acc": 0.0, "acc_std": 0.0, "bwt": -1.0, "bwt_std": 0.0, "capacity": 0.0, "time": 0.0}


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
    """Read a file of tables of results.

    Args:
        path: File to read.

    Returns:
        The rows in the order of the file.

    Raises:
        ValueError: The file is not YAML, or has an unknown name or a value that cannot be.
    """
    try:
        content = _check_mapping("the file", load_yaml(path))
        return tuple(cell for benchmark, table in content.items() for cell in _read_table(benchmark, table))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_table(benchmark: str, table: Any) -> list[Cell]:
    known = ("table", "repeated", "settings", "spread_of", "rows")
    table = _check_mapping(benchmark, table, known)
    rows = _check_mapping(f"{benchmark}: rows", table.get("rows"))
    settings = _check_mapping(f"{benchmark}: settings", table.get("settings", {}))
    where = _check_choice(f"{benchmark}: table", table.get("table"), TABLES)
    repeated = _check_choice(f"{benchmark}: repeated", table.get("repeated"), ("seed", "order"))
    read = {method: _read_row(f"{benchmark}, {method}", row) for method, row in rows.items()}
    shared = table.get("spread_of")
    if shared is not None and not (isinstance(shared, str) and shared in read and "acc_std" in read[shared][1]):
        raise ValueError(f"{benchmark}: spread_of must be a row with acc_std, got {shared!r}")
    stand_in = None if shared is None else read[shared][1]["acc_std"]
    return [
        Cell(
            benchmark,
            method,
            where,
            repeated,
            Comparison(preset, settings),
            values,
            values.get("acc_std", stand_in),
        )
        for method, (preset, values) in read.items()
    ]


def _read_row(where: str, row: Any) -> tuple[Preset, dict[str, float]]:
    row = dict(_check_mapping(where, row, ("preset", *NUMBERS)))
    preset: Preset = _check_choice(f"{where}: preset", row.pop("preset", None), PRESETS)
    for name, value in row.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{where}: {name} must be a number, got {value!r}")
        if not NUMBERS[name] <= value < math.inf:
            raise ValueError(f"{where}: {name} must be finite and at least {NUMBERS[name]:g}, got {value}")
    if "acc" not in row:
        raise ValueError(f"{where}: acc is missing")
    for name in ("acc", "bwt"):
        if f"{name}_std" in row and name not in row:
            raise ValueError(f"{where}: {name}_std is there and {name} is missing")
    return preset, {name: float(value) for name, value in row.items()}


def _check_mapping(where: str, value: Any, known: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{where} must have names and values, got {value!r}")
    unknown = [name for name in value if known and name not in known]
    if unknown:
        raise ValueError(f"{where} has {unknown[0]!r}; known names are {', '.join(known)}")
    return value


def _check_choice(where: str, value: Any, known: tuple[str, ...]) -> Any:
    if value not in known:
        raise ValueError(f"{where} must be {' or '.join(known)}, got {value!r}")
    return value
