"""The paper as data: settings of every row of its tables, and the numbers that stand there.

`benchmarks/NAME.yaml` has what all methods share on a benchmark, `methods/NAME.yaml` what a method has on all
benchmarks, `rows/BENCHMARK.METHOD.yaml` what belongs to one row. All may have `presets`: what the published code does
otherwise (`reference`), and what would be right (`corrected`). `results.yaml` has the tables of results: the numbers of
each row, and the preset and settings under which a run is compared with them. `tables/NAME.yaml` has numbers of other
tables and of the text, `sweeps/NAME.yaml` is a grid of runs behind a figure, `scores/BENCHMARK.yaml` has the scores
that the scores of a game are set against.
"""

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
Recipe = Literal["paper", "fast"]
RECIPES: tuple[str, ...] = get_args(Recipe)


def settings(benchmark: str, method: str, preset: str, recipe: str) -> dict[str, Any]:
    """Return the settings of a method on a benchmark by name.

    A preset changes some, a recipe more. The recipe of a benchmark is a schedule, whatever the preset; what a row adds
    to the recipe does not change settings that the preset names.
    """
    merged: dict[str, Any] = {}
    sources = [_load("benchmarks", benchmark), _load("methods", method), _load("rows", f"{benchmark}.{method}")]
    named: set[str] = set()
    for source in sources:
        own = source.get("presets", {}).get(preset, {})
        merged |= source.get("settings", {}) | own
        named |= own.keys()
    schedule, *added = (source.get("recipes", {}).get(recipe, {}) for source in sources)
    merged |= schedule
    for changes in added:
        merged |= {name: value for name, value in changes.items() if name not in named}
    return merged


def has_recipe(benchmark: str, recipe: str) -> bool:
    """Return whether a benchmark has a recipe."""
    return recipe == "paper" or recipe in _load("benchmarks", benchmark).get("recipes", {})


def table(name: str, benchmark: str) -> dict[str, Any]:
    """Return what the paper says of a benchmark in a table, `datasets`, or in its text, `quoted`."""
    found: dict[str, Any] = _load("tables", name).get(benchmark, {})
    return found


def rows() -> list[tuple[str, str]]:
    """Return every pair of a benchmark and a method that has settings of its own."""
    names = sorted(entry.name for entry in files(__name__).joinpath("rows").iterdir() if entry.name.endswith(".yaml"))
    return [(benchmark, method) for benchmark, method, _ in (name.split(".") for name in names)]


def scores(benchmark: str) -> dict[str, dict[str, float]]:
    """Return the scores that count as 0 (`random`) and 1 (`reference`) on each game where they are known."""
    found: dict[str, dict[str, float]] = _load("scores", benchmark)
    return found


def sweeps() -> dict[str, Traversable]:
    """Return the files of the paper's sweeps by name."""
    found = sorted(files(__name__).joinpath("sweeps").iterdir(), key=lambda entry: entry.name)
    return {entry.name.removesuffix(".yaml"): entry for entry in found if entry.name.endswith(".yaml")}


@cache
def _load(folder: str, name: str) -> dict[str, Any]:
    """Return the content of a file of this package; empty for benchmarks and methods of other packages."""
    source = files(__name__).joinpath(folder, f"{name}.yaml")
    content: dict[str, Any] = load_yaml(source) if source.is_file() else {}
    return content


# Tables of results


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
    return read_cells(files(__name__).joinpath("results.yaml"))


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
