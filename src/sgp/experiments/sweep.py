"""A sweep: a grid of runs, from a config file in which any value may be a list."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from sgp import paper
from sgp.experiments.config import CHOICES, AnyConfig, as_yaml, configure, differences, load_yaml
from sgp.experiments.folder import RunError, RunFolder
from sgp.registry import unknown

# These have their place in every run's name.
NAMED = (*CHOICES, "order", "seed")
# A folder's name may have no more than 255 characters on any common file system.
LONGEST_NAME = 200


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        name: of its folder: that of a single run, with the values of the settings that the sweep varies.
        config: what it is.
        varied: what tells it from the other points: the values that the file has in a list.
    """

    name: str
    config: AnyConfig
    varied: dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """What a sweep file asks for.

    Attributes:
        points: in the file's order; the name that stands last varies fastest.
        notes: settings that do not apply to some of the runs.
    """

    points: list[Point]
    notes: list[str]


def read_sweep(target: str) -> Sweep:
    """The sweep of a YAML file, or of a name in the paper's room.

    The file has the flat names of a config file; a list stands for every one of its values. A file may be a list of
    such grids. A setting that a method or a benchmark does not have is left out there, and points that come to the
    same run are one.

    Raises:
        ValueError: there is no such file, a setting belongs to no run, a name is unknown or a value out of range, or
            two different runs would have one name; the message has what would be accepted.
    """
    source = _source(target)
    content = load_yaml(source)
    grids = content if isinstance(content, list) else [content]
    if not grids or not all(isinstance(g, dict) and g and all(isinstance(n, str) for n in g) for g in grids):
        raise ValueError(f"{source} must have names and values, such as `method: [gpm, sgp]`, or a list of such grids")
    points: dict[str, Point] = {}
    notes: dict[str, None] = {}
    try:
        for grid in grids:
            for point in _points(grid, notes):
                _add(points, point)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    return Sweep(list(points.values()), list(notes))


def outcome(path: Path) -> dict[str, Any] | None:
    """What a run has come to: its last event, if it is finished; of a run on games also the accumulated reward."""
    try:
        events = RunFolder(path).read_events()
    except RunError:  # damaged: `sgp run` says what to do, and other runs need not wait for it
        return None
    if not events or events[-1]["event"] != "end":
        return None
    rewards = [event["accumulated"] for event in events if event["event"] == "game"]
    return events[-1] | ({"reward": rewards[-1]} if rewards else {})


def _source(target: str) -> Path | Traversable:
    path = Path(target)
    if path.is_file():
        return path
    ours = paper.sweeps()
    # A mistyped path is no mistyped name of ours.
    if path.suffix or path.name != target:
        raise ValueError(f"there is no file {target!r}")
    if target not in ours:
        raise ValueError(f"{unknown('sweep of the paper', target, ours)}; a file of yours ends in .yaml")
    return ours[target]


def _points(grid: Mapping[str, Any], notes: dict[str, None]) -> Iterator[Point]:
    """The runs of one grid, some of them more than once; what does not apply is noted."""
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
            raise ValueError(unknown("setting", name, known))
        without = [pair for pair in pairs if pair not in known[name]]
        if without:
            notes[f"{name} does not apply to {_of(without, pairs)}, and is left out there"] = None
    for combination in itertools.product(*values.values()):
        point = dict(zip(values, combination, strict=True))
        own = {name: value for name, value in point.items() if (point["method"], point["benchmark"]) in known[name]}
        config = _configured(own, [name for name in own if isinstance(grid[name], list)])
        flat = config.flat()
        # One value in a list counts too, so that names stay as they are when more values join it.
        varied = {name: flat[name] for name in own if isinstance(grid[name], list)}
        extra = [f"{name.replace('_', '-')}{_word(value)}" for name, value in varied.items() if name not in NAMED]
        yield Point("-".join([config.name, *extra]), config, varied)


def _of(some: list[tuple[str, str]], pairs: list[tuple[str, str]]) -> str:
    """Methods on benchmarks, as briefly as can be said."""
    methods, benchmarks = (list(dict.fromkeys(part)) for part in zip(*some, strict=True))
    if all(pair in some for pair in pairs if pair[0] in methods):
        return ", ".join(methods)
    if all(pair in some for pair in pairs if pair[1] in benchmarks):
        return ", ".join(benchmarks)
    return ", ".join(f"{method} on {benchmark}" for method, benchmark in some)


def _configured(values: dict[str, Any], varied: list[str]) -> AnyConfig:
    try:
        return configure(**values)
    except ValueError as error:
        where = ", ".join(f"{name} {values[name]}" for name in varied if name not in ("benchmark", "method"))
        heading = f"{values['method']} on {values['benchmark']}" + (f" with {where}" if where else "")
        raise ValueError(f"{heading}: {error}") from error


def _word(value: Any) -> str:
    """A value as a part of a folder's name."""
    if isinstance(value, dict):
        value = "_".join(f"{key}_{item}" for key, item in value.items())
    return re.sub(r"[^A-Za-z0-9.+_-]", "_", str(value).removesuffix(".0"))


def _add(points: dict[str, Point], point: Point) -> None:
    """Take a point in, unless the same run is there."""
    if len(point.name) > LONGEST_NAME:
        raise ValueError(f"{point.name!r} is too long for a folder's name: vary fewer settings in one file")
    key = as_yaml(point.config)
    if key in points:
        return
    for other in points.values():
        if other.name == point.name:
            raise ValueError(
                f"two runs would be called {point.name} ({'; '.join(differences(point.config, other.config))}): "
                "write what differs as a list, also of one value, and it becomes part of the name"
            )
    points[key] = point
