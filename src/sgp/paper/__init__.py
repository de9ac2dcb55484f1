"""The paper as data: settings of every row of its tables, and the numbers that stand there.

`benchmarks/NAME.yaml` has what all methods share on a benchmark, `methods/NAME.yaml` what a method has on all
benchmarks, `rows/BENCHMARK.METHOD.yaml` what belongs to one row. All may have `presets`: what the published code does
otherwise (`reference`), and what would be right (`corrected`). `results.yaml` has the tables of results: the numbers of
each row, and the preset and settings under which a run is compared with them. `tables/NAME.yaml` has numbers of other
tables and of the text, `sweeps/NAME.yaml` is a grid of runs behind a figure, `scores/BENCHMARK.yaml` has the scores
that the scores of a game are set against.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Literal, get_args

from sgp.paper.results import (
    PRESETS,
    Cell,
    Comparison,
    Preset,
    comparison,
    find_cell,
    find_cells,
    numbers,
    read_cells,
    times,
)
from sgp.yaml_file import load_yaml

__all__ = [
    "PRESETS",
    "RECIPES",
    "Cell",
    "Comparison",
    "Preset",
    "Recipe",
    "comparison",
    "find_cell",
    "find_cells",
    "has_recipe",
    "numbers",
    "read_cells",
    "rows",
    "scores",
    "settings",
    "sweeps",
    "table",
    "times",
]

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
