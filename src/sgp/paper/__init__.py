"""The paper as data: settings of every row of its tables, and the numbers that stand there.

`benchmarks/NAME.yaml` has what all methods share on a benchmark, `methods/NAME.yaml` what a method has on all
benchmarks, `rows/BENCHMARK.METHOD.yaml` what belongs to one row. All may have `presets`: what the published code does
otherwise (`reference`), and what would be right (`corrected`). `comparison` says how a run must be made to stand
beside the paper's numbers: a row names the preset, a benchmark the settings that all its rows share.
`tables/NAME.yaml` has numbers that are not of one row, `sweeps/NAME.yaml` is a grid of runs behind a figure,
`scores/BENCHMARK.yaml` has the scores that those of a game are set against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Literal, get_args

Preset = Literal["paper", "reference", "corrected"]
PRESETS: tuple[str, ...] = get_args(Preset)
Recipe = Literal["paper", "fast"]
RECIPES: tuple[str, ...] = get_args(Recipe)


@dataclass(frozen=True)
class Comparison:
    """How to run a method so that its numbers may stand beside those of the paper's tables.

    Attributes:
        preset: Preset of the run.
        settings: Settings that the run must have, by name. They override those of the preset.
    """

    preset: Preset = "paper"
    settings: Mapping[str, Any] = field(default_factory=dict)


def settings(benchmark: str, method: str, preset: str, recipe: str) -> dict[str, Any]:
    """The settings of a method on a benchmark by name; a preset changes some, a recipe of ours more.

    A benchmark's recipe is a schedule, whatever the preset. What a row adds to it leaves alone what a preset names.
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
    """Whether there is such a recipe for a benchmark."""
    return recipe == "paper" or recipe in _load("benchmarks", benchmark).get("recipes", {})


def numbers(benchmark: str, method: str) -> dict[str, float]:
    """What the paper reports: acc in percent, bwt as a fraction, each with its deviation; capacity in percent."""
    found: dict[str, float] = _load("rows", f"{benchmark}.{method}").get("numbers", {})
    return found


def comparison(benchmark: str, method: str) -> Comparison:
    """Return the preset and settings under which a method's row of the paper's tables is compared."""
    shared = _load("benchmarks", benchmark).get("comparison", {})
    own = _load("rows", f"{benchmark}.{method}").get("comparison", {})
    return Comparison(own.get("preset", "paper"), shared.get("settings", {}))


def table(name: str, benchmark: str) -> dict[str, Any]:
    """What a table of the paper says of a benchmark: `time` and `datasets`; `quoted` is what the text says."""
    found: dict[str, Any] = _load("tables", name).get(benchmark, {})
    return found


def rows() -> list[tuple[str, str]]:
    """Every benchmark and method that have settings of their own."""
    names = sorted(entry.name for entry in files(__name__).joinpath("rows").iterdir() if entry.name.endswith(".yaml"))
    return [(benchmark, method) for benchmark, method, _ in (name.split(".") for name in names)]


def scores(benchmark: str) -> dict[str, dict[str, float]]:
    """Of each game with known ones, the scores that count as 0 (`random`) and 1 (`reference`)."""
    found: dict[str, dict[str, float]] = _load("scores", benchmark)
    return found


def sweeps() -> dict[str, Traversable]:
    """The files of the paper's sweeps, by name."""
    found = sorted(files(__name__).joinpath("sweeps").iterdir(), key=lambda entry: entry.name)
    return {entry.name.removesuffix(".yaml"): entry for entry in found if entry.name.endswith(".yaml")}


@cache
def _load(folder: str, name: str) -> dict[str, Any]:
    """A file of this room; empty if there is none, as for what other packages bring."""
    # Imported here: the core needs no YAML.
    import yaml

    source = files(__name__).joinpath(folder, f"{name}.yaml")
    content: dict[str, Any] = yaml.safe_load(source.read_text(encoding="utf-8")) if source.is_file() else {}
    return content
