"""The paper's tables of results beside the runs that can be compared with them. Nothing here imports torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from sgp.experiments.config import configure
from sgp.experiments.record import CONFIG, REPEATS, TECHNICAL, Record, RunError, read_record
from sgp.paper import Cell, comparison, find_cells

Status = Literal["agrees", "off", "no spread", "partial", "not run"]
# Largest |z| that counts as agreement.
LARGEST_Z = 2.0
# Smallest standard deviation of BWT in points: the paper rounds to whole points, so 0.00 is anything below this.
LEAST_BWT_SPREAD = 0.5
EXPLANATION = (
    "z = (ours - paper) / (sd sqrt(1 + 1/n)), with n runs of ours and the sd of the paper. A row agrees if |z| <= 2 "
    "for ACC and, where there is a z, for BWT. An sd of BWT that the paper prints as 0 counts as 0.5 points."
)
# Settings that say how much a run trains.
AMOUNTS = ("tasks", "epochs", "samples")
# Names of settings, which are compared by what they stand for.
LABELS = ("preset", "recipe")


@dataclass(frozen=True)
class Outcome:
    """A cell of the paper's tables with the runs that can be compared with it.

    Attributes:
        cell: Cell of the paper.
        runs: Runs that count for it, of different seeds or task orders.
        differences: What tells these runs from the full protocol, in words; empty if they can be compared.
    """

    cell: Cell
    runs: Sequence[Record]
    differences: Sequence[str] = ()

    @property
    def is_full(self) -> bool:
        """Whether there are runs of the full protocol."""
        return bool(self.runs) and not self.differences

    @property
    def acc(self) -> float | None:
        """Mean ACC in percent; None without runs."""
        return mean(run.acc for run in self.runs) if self.runs else None

    @property
    def bwt(self) -> float | None:
        """Mean BWT in points; None if no run has one, or if all tasks are learned at once."""
        if self.cell.table == "table1" and "bwt" not in self.cell.numbers:
            return None
        values = [run.bwt for run in self.runs if run.bwt is not None]
        return mean(values) if values else None

    @property
    def capacity(self) -> float | None:
        """Mean capacity in percent; None without runs."""
        return mean(run.capacity for run in self.runs) if self.runs else None

    @property
    def seconds(self) -> float | None:
        """Mean wall time of a run; None without runs."""
        return mean(run.seconds for run in self.runs) if self.runs else None

    @property
    def acc_z(self) -> float | None:
        """Deviation of ACC from the paper's in standard deviations; None if it cannot be compared."""
        return self._compute_z(self.acc, self.cell.numbers["acc"], self.cell.acc_spread)

    @property
    def bwt_z(self) -> float | None:
        """Deviation of BWT from the paper's in standard deviations; None if it cannot be compared."""
        numbers = self.cell.numbers
        if "bwt_std" not in numbers:
            return None
        return self._compute_z(self.bwt, 100 * numbers["bwt"], max(100 * numbers["bwt_std"], LEAST_BWT_SPREAD))

    def _compute_z(self, ours: float | None, published: float, spread: float | None) -> float | None:
        """Return (ours - published) / (spread sqrt(1 + 1/n)), the deviation of a mean of n from the paper's mean.

        The paper's mean is taken as exact, and ours as one of n runs with the paper's spread around it.
        """
        if not self.is_full or ours is None or not spread:
            return None
        return (ours - published) / (spread * math.sqrt(1 + 1 / len(self.runs)))

    @property
    def status(self) -> Status:
        """Whether the paper's numbers are reproduced."""
        if not self.runs:
            return "not run"
        if self.differences:
            return "partial"
        deviations = [z for z in (self.acc_z, self.bwt_z) if z is not None]
        if not deviations:
            return "no spread"
        return "agrees" if all(abs(z) <= LARGEST_Z for z in deviations) else "off"


@dataclass(frozen=True)
class Reproduction:
    """Every cell of the paper's tables of results with its runs.

    Attributes:
        outcomes: One for each cell, in the order of the paper.
    """

    outcomes: Sequence[Outcome]

    @cached_property
    def benchmarks(self) -> list[str]:
        """Names of the benchmarks, in the order of the paper."""
        return list(dict.fromkeys(outcome.cell.benchmark for outcome in self.outcomes))

    def select(self, benchmark: str) -> list[Outcome]:
        """Return the outcomes of a benchmark."""
        return [outcome for outcome in self.outcomes if outcome.cell.benchmark == benchmark]

    def find(self, benchmark: str, method: str) -> Outcome | None:
        """Return the outcome of a method on a benchmark; None if the paper has no such row."""
        return next((each for each in self.select(benchmark) if each.cell.method == method), None)

    def compute_time_ratio(self, outcome: Outcome) -> float | None:
        """Return the time of a row's runs relative to GPM's; None unless both have runs of the full protocol."""
        reference = self.find(outcome.cell.benchmark, "gpm")
        if reference is None or not (reference.is_full and outcome.is_full and reference.seconds):
            return None
        return (outcome.seconds or 0.0) / reference.seconds


def find_records(folders: Iterable[Path]) -> tuple[list[Record], list[tuple[Path, str]]]:
    """Read the finished runs on the benchmarks of the paper's tables.

    Args:
        folders: Folders of runs, or folders with runs somewhere inside.

    Returns:
        The runs, and the folders that were left out, each with the reason.
    """
    benchmarks = {cell.benchmark for cell in find_cells()}
    found: dict[Path, Record] = {}
    left_out: dict[Path, str] = {}
    for config in sorted(file for folder in folders for file in folder.rglob(CONFIG)):
        path = config.parent
        if path.resolve() in found or path in left_out or not _may_be_of(config, benchmarks):
            continue
        try:
            found[path.resolve()] = read_record(path)
        except RunError as error:
            left_out[path] = str(error)
    return list(found.values()), list(left_out.items())


def _may_be_of(config: Path, benchmarks: set[str]) -> bool:
    """Return False for a run that is clearly on another benchmark, without parsing its config."""
    try:
        named = re.search(r"^benchmark: *([\w-]+) *$", config.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return True
    return named is None or named[1] in benchmarks


def reproduce(records: Sequence[Record], cells: Iterable[Cell] | None = None) -> Reproduction:
    """Set runs beside the paper's tables.

    A run counts for a cell if all its settings are those of the cell's preset and settings. Seed and task order may
    differ, as may settings that change the last bits at most. Where no run counts, the one nearest to the full
    protocol is named with what it lacks.

    Args:
        records: Finished runs.
        cells: Cells of the paper; None takes all.

    Returns:
        An outcome for each cell.
    """
    return Reproduction([_find_outcome(cell, records) for cell in (find_cells() if cells is None else cells)])


def find_expected_settings(benchmark: str, method: str) -> dict[str, Any]:
    """Return every setting, by name, of a run that can be compared with the paper."""
    how = comparison(benchmark, method)
    return configure(benchmark, method, how.preset, **how.settings).flat()


def _find_outcome(cell: Cell, records: Sequence[Record]) -> Outcome:
    expected = find_expected_settings(cell.benchmark, cell.method)
    groups: dict[str, dict[tuple[Any, ...], Record]] = {}
    differences: dict[str, dict[str, Any]] = {}
    for record in records:
        if (record.settings["benchmark"], record.settings["method"]) == (cell.benchmark, cell.method):
            different = find_differences(record.settings, expected)
            key = repr(sorted(different.items()))
            differences[key] = different
            # A second run of the same settings and seed is the same run, and counts once.
            groups.setdefault(key, {}).setdefault(tuple(record.settings.get(name) for name in REPEATS), record)
    if not groups:
        return Outcome(cell, ())

    def rank(key: str) -> tuple[Any, ...]:
        first = next(iter(groups[key].values()))
        own = first.settings
        amount = len(first.accuracies) * own["epochs"]
        return not differences[key], own["recipe"] == expected["recipe"], amount, -len(differences[key])

    best = max(groups, key=rank)
    runs = list(groups[best].values())
    return Outcome(cell, runs, tuple(_describe(runs[0].settings, expected)))


def find_differences(own: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that are not those expected, by name.

    Args:
        own: Settings of the run.
        expected: Settings to compare with.

    Returns:
        Values of the run; None for a setting that it lacks. Seed, task order, settings that change the last bits at
        most, and the names of preset and recipe are not compared.
    """
    ignored = (*REPEATS, *TECHNICAL, *LABELS)
    names = [name for name in {**expected, **own} if name not in ignored]
    return {name: own.get(name) for name in names if name not in expected or own.get(name) != expected[name]}


def _describe(own: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """Yield what tells a run from the expected settings, in words. A preset or recipe stands for what it changes."""
    different = find_differences(own, expected)
    for name in AMOUNTS:
        if name in different:
            value, whole = different.pop(name), expected.get(name)
            yield f"{value} {name}" if whole is None else f"{value} of {whole} {name}"
    usual: Mapping[str, Any] = {}
    for label in LABELS:
        if different and own[label] != expected[label]:
            usual = configure(own["benchmark"], own["method"], own["preset"], own["recipe"]).flat()
            yield f"{label} {own[label]}"
    for name, value in different.items():
        if name not in usual or usual[name] != value:
            yield f"{name} {value}"


def explain_spread(outcomes: Sequence[Outcome]) -> str:
    """Return what stands in for a spread that the paper does not give, in words; empty if every row has its own."""
    cells = [outcome.cell for outcome in outcomes]
    lacking = next((cell for cell in cells if "acc_std" not in cell.numbers and cell.acc_spread), None)
    if lacking is None:
        return ""
    row = next(cell for cell in find_cells() if cell.benchmark == lacking.benchmark and "acc_std" in cell.numbers)
    return (
        f"~: the paper gives no sd for this row; the {lacking.acc_spread:.2f} of {row.method} stands in. BWT has none, "
        "so no z."
    )


def find_missing(outcome: Outcome, count: int) -> list[int]:
    """Return the seeds or task orders that a cell needs for a number of runs of the full protocol.

    Args:
        outcome: Outcome of the cell.
        count: Number of runs that the cell should have.

    Returns:
        The smallest seeds (or orders, where the paper's mean is over orders) that no run has.
    """
    taken = {run.settings[outcome.cell.repeated] for run in outcome.runs} if outcome.is_full else set()
    free = (number for number in range(count + len(taken)) if number not in taken)
    return [number for number, _ in zip(free, range(count - len(taken)), strict=False)]


def make_grid(outcome: Outcome, repeats: Sequence[int]) -> dict[str, Any]:
    """Return the grid of a sweep file that makes runs for a cell, of some seeds or task orders."""
    cell, how = outcome.cell, outcome.cell.comparison
    grid: dict[str, Any] = {"benchmark": cell.benchmark, "method": cell.method, "preset": how.preset}
    usual = configure(cell.benchmark, cell.method, how.preset).flat()
    # As lists, so that they become part of the names of the folders.
    changed = {name: [value] for name, value in how.settings.items() if usual[name] != value}
    return grid | {cell.repeated: list(repeats)} | changed


def estimate_seconds(reproduction: Reproduction, outcome: Outcome) -> tuple[float, str] | None:
    """Estimate the wall time of a run of the full protocol.

    Args:
        reproduction: Every cell with its runs.
        outcome: Outcome of the cell to estimate.

    Returns:
        The time in seconds and what it was estimated from; None if nothing is known.
    """
    seconds = outcome.seconds
    if seconds is None:
        return _estimate_from_others(reproduction, outcome.cell)
    if outcome.is_full:
        return seconds, f"from {len(outcome.runs)} of the same settings"
    whole = find_expected_settings(outcome.cell.benchmark, outcome.cell.method)
    own = outcome.runs[0].settings
    scale = (whole["tasks"] * whole["epochs"]) / (len(outcome.runs[0].accuracies) * own["epochs"])
    return scale * seconds, f"at most, scaled from {', '.join(outcome.differences[:2])}"


def _estimate_from_others(reproduction: Reproduction, cell: Cell) -> tuple[float, str] | None:
    """Return the estimated time of a method without runs, by the paper's ratio to a method with runs, at best GPM."""
    others = [each for each in reproduction.select(cell.benchmark) if each.runs and "time" in each.cell.numbers]
    known = max(others, key=lambda each: (each.is_full, each.cell.method == "gpm"), default=None)
    if known is None or "time" not in cell.numbers:
        return None
    seconds, source = estimate_seconds(reproduction, known) or (0.0, "")
    ratio = cell.numbers["time"] / known.cell.numbers["time"]
    return ratio * seconds, f"{ratio:.2f} times {known.cell.method}'s, as in the paper ({source})"
