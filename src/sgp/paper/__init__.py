"""The paper as data: settings of every row of its tables, and the numbers that stand there.

`benchmarks/NAME.yaml` has what all methods share on a benchmark, `methods/NAME.yaml` what a method has on all
benchmarks, `rows/BENCHMARK.METHOD.yaml` what belongs to one row. All may have `presets`: what the published code does
otherwise (`reference`), and what would be right (`corrected`).
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

Preset = Literal["paper", "reference", "corrected"]
PRESETS: tuple[str, ...] = get_args(Preset)
Recipe = Literal["paper", "fast"]
RECIPES: tuple[str, ...] = get_args(Recipe)


def settings(benchmark: str, method: str, preset: str, recipe: str) -> dict[str, Any]:
    """The settings of a method on a benchmark by name; a preset changes some, a recipe of ours more."""
    merged: dict[str, Any] = {}
    sources = [_load("benchmarks", benchmark), _load("methods", method), _load("rows", f"{benchmark}.{method}")]
    for source in sources:
        merged |= source.get("settings", {}) | source.get("presets", {}).get(preset, {})
    for source in sources:
        merged |= source.get("recipes", {}).get(recipe, {})
    return merged


def has_recipe(benchmark: str, recipe: str) -> bool:
    """Whether there is such a recipe for a benchmark."""
    return recipe == "paper" or recipe in _load("benchmarks", benchmark).get("recipes", {})


def numbers(benchmark: str, method: str) -> dict[str, float]:
    """What the paper reports: acc in percent, bwt as a fraction, each with its deviation; capacity in percent."""
    found: dict[str, float] = _load("rows", f"{benchmark}.{method}").get("numbers", {})
    return found


def rows() -> list[tuple[str, str]]:
    """Every benchmark and method that have settings of their own."""
    names = sorted(entry.name for entry in files(__name__).joinpath("rows").iterdir() if entry.name.endswith(".yaml"))
    return [(benchmark, method) for benchmark, method, _ in (name.split(".") for name in names)]


@cache
def _load(folder: str, name: str) -> dict[str, Any]:
    """A file of this room; empty if there is none, as for what other packages bring."""
    # Imported here: the core needs no YAML.
    import yaml

    source = files(__name__).joinpath(folder, f"{name}.yaml")
    content: dict[str, Any] = yaml.safe_load(source.read_text(encoding="utf-8")) if source.is_file() else {}
    return content
