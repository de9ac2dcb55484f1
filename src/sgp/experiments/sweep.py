"""Sweeps: grids of runs, from a config file in which any value can be a list."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sgp import paper
from sgp.experiments.config import (
    CHOICES,
    Config,
    as_yaml,
    configure,
    find_differences,
    find_near_settings,
    find_owners,
)
from sgp.registry import unknown
from sgp.yaml_file import load_yaml

# Settings that are part of every run's name.
NAMED = (*CHOICES, "order", "seed")
# Common file systems allow names of 255 characters.
LONGEST_NAME = 200


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        name: Name of its folder: the name of a single run, with the values of the settings that the sweep varies.
        config: Config of the run.
        varied: Values that the file has in a list, by name; the points of a sweep differ in them.
    """

    name: str
    config: Config[Any]
    varied: dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """Content of a sweep file.

    Attributes:
        points: Runs in the file's order; the last name varies fastest.
        notes: Sentences on settings that do not apply to some of the runs.
    """

    points: list[Point]
    notes: list[str]


def read_sweep(target: str, overrides: Mapping[str, Any] = MappingProxyType({})) -> Sweep:
    """Read the sweep of a YAML file, or one of the paper's sweeps.

    The file has the flat names of a config file; a list is expanded to each of its values. A file can be a list of
    such grids. A setting that a method or a benchmark does not have is left out there, and equal runs are merged.

    Args:
        target: Path of the file, or name of one of the paper's sweeps.
        overrides: Settings that replace those of the file.

    Raises:
        ValueError: There is no such file, a setting belongs to no run, a name is unknown, a value is not accepted, or
            two different runs would have one name; the message says what is accepted.
    """
    source = _find_source(target)
    return expand_grids(load_yaml(source), str(source), overrides)


def expand_grids(content: Any, source: str, overrides: Mapping[str, Any] = MappingProxyType({})) -> Sweep:
    """Return the sweep of a grid, or of a list of grids.

    Args:
        content: Grids as in a sweep file.
        source: Where the grids are from, for errors.
        overrides: Settings that replace those of the grids.

    Raises:
        ValueError: As `read_sweep`.
    """
    grids = content if isinstance(content, list) else [content]
    if not grids or not all(isinstance(g, dict) and g and all(isinstance(n, str) for n in g) for g in grids):
        raise ValueError(f"{source} must have names and values, such as `method: [gpm, sgp]`, or a list of such grids")
    points: dict[str, Point] = {}
    notes: dict[str, None] = {}
    try:
        for grid in grids:
            for point in _expand(grid | overrides, notes):
                _add_point(points, point)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    return Sweep(list(points.values()), list(notes))


def _find_source(target: str) -> Path | Traversable:
    path = Path(target)
    if path.is_file():
        return path
    ours = paper.sweeps()
    # A mistyped path is not a mistyped name of ours.
    if path.suffix or path.name != target:
        raise ValueError(f"there is no file {target!r}")
    if target not in ours:
        raise ValueError(f"{unknown('sweep of the paper', target, ours)}; the name of your own file ends in .yaml")
    return ours[target]


def _expand(grid: Mapping[str, Any], notes: dict[str, None]) -> Iterator[Point]:
    """Yield the runs of one grid, some of them more than once, and note the settings that do not apply."""
    values = {name: value if isinstance(value, list) else [value] for name, value in grid.items()}
    for name in ("benchmark", "method"):
        if name not in values:
            raise ValueError(f"it does not say which {name}")
    for name, given in values.items():
        if not given:
            raise ValueError(f"{name} is an empty list")
        if name in CHOICES and not all(isinstance(value, str) for value in given):
            raise ValueError(f"{name} must be a name or a list of names, got {grid[name]!r}")
    known: dict[str, set[tuple[str, str]]] = {}
    pairs = list(itertools.product(values["method"], values["benchmark"]))
    for method, benchmark in pairs:
        for name in configure(benchmark, method).flat():
            known.setdefault(name, set()).add((method, benchmark))
    for name in values:
        if name not in known:
            raise ValueError(_explain_unknown(name, known))
        without = [pair for pair in pairs if pair not in known[name]]
        if without:
            notes[f"{name} does not apply to {_describe_pairs(without, pairs)}, and is left out there"] = None
    for combination in itertools.product(*values.values()):
        point = dict(zip(values, combination, strict=True))
        own = {name: value for name, value in point.items() if (point["method"], point["benchmark"]) in known[name]}
        config = _configure_point(own, [name for name in own if isinstance(grid[name], list)])
        flat = config.flat()
        # One value in a list counts too, so that names stay as they are when more values join it.
        varied = {name: flat[name] for name in own if isinstance(grid[name], list)}
        unnamed = {name: value for name, value in varied.items() if name not in NAMED}
        extra = [f"{name.replace('_', '-')}{_format_word(value)}" for name, value in unnamed.items()]
        yield Point("-".join([config.name, *extra]), config, varied)


def _explain_unknown(name: str, known: Mapping[str, object]) -> str:
    """Return the error message for a setting that no run of a grid has."""
    owners, near = find_owners(name), find_near_settings(name, known)
    if owners:
        return f"no run has the setting {name}; it is one of {owners}"
    hint = f": did you mean {' or '.join(near)}?" if near else ""
    return f"there is no setting {name!r}{hint}"


def _describe_pairs(some: list[tuple[str, str]], pairs: list[tuple[str, str]]) -> str:
    """Return some pairs of method and benchmark in as few words as possible."""
    methods, benchmarks = (list(dict.fromkeys(part)) for part in zip(*some, strict=True))
    if all(pair in some for pair in pairs if pair[0] in methods):
        return ", ".join(methods)
    if all(pair in some for pair in pairs if pair[1] in benchmarks):
        return ", ".join(benchmarks)
    return ", ".join(f"{method} on {benchmark}" for method, benchmark in some)


def _configure_point(values: dict[str, Any], varied: list[str]) -> Config[Any]:
    try:
        return configure(**values)
    except ValueError as error:
        where = ", ".join(f"{name} {values[name]}" for name in varied if name not in ("benchmark", "method"))
        heading = f"{values['method']} on {values['benchmark']}" + (f" with {where}" if where else "")
        raise ValueError(f"{heading}: {error}") from error


def _format_word(value: Any) -> str:
    """Return a value as a part of a folder's name."""
    if isinstance(value, dict):
        value = "_".join(f"{key}_{item}" for key, item in value.items())
    return re.sub(r"[^A-Za-z0-9.+_-]", "_", str(value).removesuffix(".0"))


def _add_point(points: dict[str, Point], point: Point) -> None:
    """Add a point, unless the same run already exists."""
    if len(point.name) > LONGEST_NAME:
        raise ValueError(f"{point.name!r} is too long for a folder's name: vary fewer settings in one file")
    key = as_yaml(point.config)
    if key in points:
        return
    for other in points.values():
        if other.name == point.name:
            raise ValueError(
                f"two runs would be called {point.name} ({'; '.join(find_differences(point.config, other.config))}): "
                "write what differs as a list, also of one value, and it becomes part of the name"
            )
    points[key] = point
