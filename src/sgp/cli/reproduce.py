"""``sgp reproduce [TABLE ...]``. Printing the tables does not import torch."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import sgp
from sgp.cli.arguments import flag, parse_into, positional
from sgp.cli.sweep import Options as SweepOptions
from sgp.experiments.callbacks import format_duration
from sgp.experiments.config import as_command
from sgp.experiments.sweep import Sweep, expand_grids
from sgp.paper import TABLES, find_cells
from sgp.registry import unknown
from sgp.report import words
from sgp.report.reproduction import (
    EXPLANATION,
    Outcome,
    Reproduction,
    estimate_seconds,
    explain_spread,
    find_expected_settings,
    find_missing,
    find_records,
    make_grid,
    reproduce,
)
from sgp.settings import Settings, setting

# Runs of the repository that this package runs from; an installed package has none.
COMMITTED = Path(sgp.__file__).resolve().parents[2] / "results" / "runs"
WIDTH = 80
TIME = "time"
ABOUT_TIMES = (
    "Wall time relative to GPM's, of runs of the full protocol. The paper gives no sd, so nothing is judged: its "
    "times are of one GPU, ours of the machines that made the runs."
)


@dataclass(frozen=True)
class Options(Settings):
    """Print the paper's tables of results beside the runs that can be compared with them, or make what is missing.

    A run is compared if all its settings are those of the table's row; seed and task order can differ.
    """

    tables: tuple[str, ...] = positional("TABLE ...", ())
    """Tables whose missing runs are made: table1, table2 or the name of a benchmark. Without one, nothing is run."""
    methods: str = ""
    """Methods to print or run, separated by commas; by default all."""
    seeds: int = setting(5, low=1)
    """Number of runs that each row should have: seeds in table1, task orders in table2."""
    runs: tuple[Path, ...] = ()
    """Folder with more runs to compare; can be given several times."""
    out: Path = Path("runs")
    """Folder for the new runs; runs in it are compared too."""
    data: Path | None = None
    """Folder with the data sets; by default $SGP_DATA."""
    device: str | None = None
    """Torch device of the new runs, such as cuda or cuda:1; by default cpu."""
    jobs: int | None = setting(None, low=1)
    """Number of parallel runs on this machine; by default as many as its cores allow."""
    dry_run: bool = flag()
    """Print the commands of the missing runs without running them."""

    def __post_init__(self) -> None:
        """Check the fields, and that tables, methods and folders exist."""
        super().__post_init__()
        if self.dry_run and not self.tables:
            raise ValueError("dry-run needs a table: table1, table2 or a benchmark")
        cells = find_cells()
        benchmarks = {cell.benchmark for cell in cells}
        for name in self.tables:
            if name not in (*TABLES, *benchmarks):
                raise ValueError(unknown("table", name, [*TABLES, *benchmarks]))
        known = {cell.method for cell in cells}
        for method in self.selected:
            if method not in known:
                raise ValueError(unknown("method in the paper's tables", method, known))
        for path in self.runs:
            if not path.is_dir():
                raise ValueError(f"there is no folder {path}")

    @property
    def selected(self) -> list[str]:
        """Methods that were asked for."""
        return [method for method in self.methods.split(",") if method]


def main(arguments: list[str]) -> int:
    """Return the exit status after printing the paper's tables, or running what is missing in some of them."""
    options = parse_into(Options, "sgp reproduce [TABLE ...] [OPTIONS]", arguments)
    reproduction, left_out = _compare(options)
    for path, reason in left_out:
        print(f"sgp reproduce: {path} is left out: {reason}", file=sys.stderr)
    if not options.tables:
        print_tables(reproduction, options.selected)
        return 0
    missing = [(outcome, find_missing(outcome, options.seeds)) for outcome in _select(reproduction, options.selected)]
    missing = [(outcome, repeats) for outcome, repeats in missing if repeats]
    status = 0
    if missing:
        _print_estimate(reproduction, missing, options.out)
        sweep = _plan_sweep(missing, options)
        if options.dry_run:
            _print_commands(sweep, options.out)
            return 0
        if sys.stdin.isatty() and input("Run them? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1
        status = _run_sweep(sweep, options, resume=shlex.join(["sgp", "reproduce", *arguments]))
        reproduction, _ = _compare(options)
    print_tables(reproduction, options.selected)
    return status


def _compare(options: Options) -> tuple[Reproduction, list[tuple[Path, str]]]:
    """Return the comparison of the committed runs, --runs and --out, and the folders that were left out."""
    records, left_out = find_records([COMMITTED, *options.runs, options.out])
    names = options.tables or TABLES
    cells = [cell for cell in find_cells() if cell.table in names or cell.benchmark in names]
    return reproduce(records, cells), left_out


def _select(reproduction: Reproduction, methods: Sequence[str]) -> list[Outcome]:
    """Return the outcomes of some methods; of all methods if none is named."""
    return [each for each in reproduction.outcomes if not methods or each.cell.method in methods]


def print_tables(reproduction: Reproduction, methods: Sequence[str] = ()) -> None:
    """Print each table of results, and the table of training times, at 80 columns.

    Args:
        reproduction: Every cell with its runs.
        methods: Methods to print; all if empty.
    """
    outcomes = _select(reproduction, methods)
    for benchmark in reproduction.benchmarks:
        own = [outcome for outcome in outcomes if outcome.cell.benchmark == benchmark]
        if own:
            _print_results(benchmark, own)
    timed = [outcome for outcome in outcomes if TIME in outcome.cell.numbers]
    if timed:
        _print_times(reproduction, timed)
    print(textwrap.fill(EXPLANATION, WIDTH))


def _print_results(benchmark: str, outcomes: Sequence[Outcome]) -> None:
    cell = outcomes[0].cell
    tasks = find_expected_settings(cell.benchmark, cell.method)["tasks"]
    heading = f"{cell.table.capitalize()[:-1]} {cell.table[-1]}: {words.name_benchmark(benchmark)}, {tasks} tasks"
    print(f"{heading}; the paper's mean of 5 {'task ' * (cell.repeated == 'order')}{cell.repeated}s")
    has_capacity = any("capacity" in outcome.cell.numbers for outcome in outcomes)
    last = ("cap. %", "paper") if has_capacity else ("paper", "z")
    print(_format_row("method", "n", "ACC (%)", "paper", "z", "BWT (%)", *last, "status"))
    for outcome in outcomes:
        print(_format_outcome(outcome, has_capacity=has_capacity))
    explanation = explain_spread(outcomes)
    if explanation:
        print(textwrap.fill(explanation, WIDTH))
    partial = [outcome for outcome in outcomes if outcome.status == "partial"]
    if partial:
        print("partial, in brackets: not compared, because of")
    for outcome in partial:
        text = f"{outcome.cell.method}: {', '.join(outcome.differences)}"
        print(textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    "))
    print()


def _format_outcome(outcome: Outcome, *, has_capacity: bool) -> str:
    numbers = outcome.cell.numbers
    acc, bwt, capacity = "", "", ""
    if outcome.runs:
        acc = words.format_spread([run.acc for run in outcome.runs], 2)
        bwt = "" if outcome.bwt is None else words.format_number(outcome.bwt, 1)
        capacity = f"{outcome.capacity:.0f}"
    if outcome.status == "partial":
        acc, bwt, capacity = f"({acc})", f"({bwt})" if bwt else "", f"({capacity})"
    theirs = f"{numbers['acc']:.2f}" + (f" ± {numbers['acc_std']:.2f}" if "acc_std" in numbers else "")
    stands_in = "" if "acc_std" in numbers else "~"
    z = "" if outcome.acc_z is None else words.format_signed(outcome.acc_z, 1) + stands_in
    if has_capacity:
        last = (capacity, f"{numbers['capacity']:.0f}" if "capacity" in numbers else "")
    else:
        their_bwt = words.format_number(100 * numbers["bwt"], 0) if "bwt" in numbers else ""
        their_bwt += f" ± {100 * numbers['bwt_std']:.0f}" if "bwt_std" in numbers else ""
        last = (their_bwt, "" if outcome.bwt_z is None else words.format_signed(outcome.bwt_z, 1))
    runs = str(len(outcome.runs)) if outcome.runs else ""
    return _format_row(outcome.cell.method, runs, acc, theirs, z, bwt, *last, outcome.status)


def _format_row(*cells: str) -> str:
    """Return the cells of a row of results: text to the left, numbers to the right."""
    method, runs, acc, their_acc, z, bwt, last, last_but_status, status = cells
    text = f"{method:<10}{runs:>2} {acc:>14} {their_acc:>13} {z:>5} {bwt:>7} {last:>7} {last_but_status:>5}  {status}"
    return text.rstrip().replace(words.MINUS, "-")


def _print_times(reproduction: Reproduction, timed: Sequence[Outcome]) -> None:
    benchmarks = list(dict.fromkeys(outcome.cell.benchmark for outcome in timed))
    print("Table 5: training time relative to GPM's, ours and the paper's")
    print(f"{'method':<10}" + "".join(f"{words.name_benchmark(benchmark):>23}" for benchmark in benchmarks))
    for method in dict.fromkeys(outcome.cell.method for outcome in timed):
        cells = [_format_time(reproduction, benchmark, method) for benchmark in benchmarks]
        print(f"{method:<10}{''.join(cells)}".rstrip())
    print(textwrap.fill(ABOUT_TIMES, WIDTH) + "\n")


def _format_time(reproduction: Reproduction, benchmark: str, method: str) -> str:
    outcome = reproduction.find(benchmark, method)
    if outcome is None or TIME not in outcome.cell.numbers:
        return f"{'':>23}"
    ratio = reproduction.compute_time_ratio(outcome)
    ours = f"{ratio:.2f}" if ratio is not None else outcome.status if not outcome.is_full else "no GPM"
    return f"{ours:>15}{outcome.cell.numbers[TIME]:>8.2f}"


def _print_estimate(reproduction: Reproduction, missing: Sequence[tuple[Outcome, Sequence[int]]], out: Path) -> None:
    amount = sum(len(repeats) for _, repeats in missing)
    print(f"{words.format_count(amount, 'run')} to make, in {out}:")
    total, unknown_times = 0.0, 0
    for outcome, repeats in missing:
        cell = outcome.cell
        known = estimate_seconds(reproduction, outcome)
        total += known[0] * len(repeats) if known else 0.0
        unknown_times += 0 if known else len(repeats)
        each = f"{format_duration(known[0])} each, {known[1]}" if known else "time unknown"
        text = f"{cell.benchmark} {cell.method}, {cell.repeated} {', '.join(map(str, repeats))}: {each}"
        print(textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    "))
    without = f", without {words.format_count(unknown_times, 'run')} of unknown time" if unknown_times else ""
    print(f"about {format_duration(total)} of one core in all{without}")


def _plan_sweep(missing: Sequence[tuple[Outcome, Sequence[int]]], options: Options) -> Sweep:
    """Return the sweep that makes the missing runs."""
    grids = [make_grid(outcome, repeats) for outcome, repeats in missing]
    return expand_grids(grids, "sgp reproduce", {"device": options.device} if options.device else {})


def _print_commands(sweep: Sweep, out: Path) -> None:
    for point in sweep.points:
        print(f"{as_command(point.config)} {shlex.join(['--out', str(out), '--name', point.name, '--resume'])}")


def _run_sweep(sweep: Sweep, options: Options, resume: str) -> int:
    """Return the exit status of a sweep, which resumes runs that were stopped. This imports torch."""
    from sgp.cli.launch_sweep import launch_sweep

    tables = " ".join(options.tables)
    return launch_sweep(sweep, SweepOptions(tables, out=options.out, data=options.data, jobs=options.jobs), resume)
