"""Tables of a report: the paper's tables with our runs beside them, and all experiments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgp import paper
from sgp.benchmarks.metrics import relative_fwt
from sgp.experiments.callbacks import format_duration
from sgp.experiments.config import configure
from sgp.experiments.record import REPEATS, TECHNICAL
from sgp.methods import METHODS
from sgp.report import words
from sgp.report.groups import Group, find_reference
from sgp.report.reproduction import EXPLANATION, Outcome, explain_spread, reproduce

DATA = {
    "inputs": "input size",
    "classes": "classes per task",
    "train": "training examples per task",
    "validation": "validation examples per task",
    "test": "test examples per task",
}


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: Text to show.
        value: Number to sort by.
        link: Anchor of the runs behind the number.
        note: Short remark beside the text.
        tone: "good" for agreement with the paper, "off" for a deviation.
    """

    text: str = ""
    value: float | None = None
    link: str = ""
    note: str = ""
    tone: str = ""


def make_cell(value: float | None, text: Callable[[float], str], link: str = "") -> Cell:
    """Return the cell of a number as a function formats it, or an empty cell without a number."""
    return Cell() if value is None else Cell(text(value), value, link)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: Title of the column.
        numeric: Whether the column is aligned to the right.
        paper: Whether the column has numbers of the paper.
    """

    title: str
    numeric: bool = True
    paper: bool = False


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: Name of the table's files.
        title: Caption.
        columns: Columns, of which the first names the row.
        rows: Rows with a cell for each column.
        note: What a reader should know.
        benchmark: Benchmark that the table belongs to; empty if it is of all.
        sortable: Whether the rows have no order of their own.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    benchmark: str = ""
    sortable: bool = True


def make_paper_table(benchmark: str, groups: Sequence[Group]) -> Table | None:
    """Make the paper's table of results of a benchmark, with our runs of the full protocol beside each row.

    Args:
        benchmark: Name of the benchmark.
        groups: Groups of the benchmark.

    Returns:
        The table; None if the paper has no results of the benchmark.
    """
    cells = [cell for cell in paper.find_cells() if cell.benchmark == benchmark]
    if not cells:
        return None
    outcomes = reproduce([run.record for each in groups for run in each.runs], cells).outcomes
    anchors = {run.path: each.anchor for each in groups for run in each.runs}
    has_capacity = any("capacity" in cell.numbers for cell in cells)
    columns = [Column("Method", numeric=False), Column("Runs"), Column("ACC (%)"), Column("Paper: ACC (%)", paper=True)]
    columns += [Column("z of ACC"), Column("BWT (%)")]
    if has_capacity:
        columns += [Column("Capacity (%)"), Column("Paper: capacity (%)", paper=True)]
    else:
        columns += [Column("Paper: BWT (%)", paper=True), Column("z of BWT")]
    columns += [Column("Status", numeric=False)]
    rows = [
        _make_paper_row(each, anchors[each.runs[0].path] if each.runs else "", has_capacity=has_capacity)
        for each in outcomes
    ]
    title = f"Table {cells[0].table[-1]} of the paper: {words.name_benchmark(benchmark)}"
    note = f"{EXPLANATION} {explain_spread(outcomes)}".strip()
    note += " Numbers in brackets are of partial runs, and not compared."
    return Table(f"{cells[0].table}-{benchmark}", title, columns, rows, note, benchmark)


def _make_paper_row(outcome: Outcome, link: str, *, has_capacity: bool) -> list[Cell]:
    numbers, runs = outcome.cell.numbers, outcome.runs
    brackets = "({})" if outcome.status == "partial" else "{}"

    def make_own(value: float | None, text: Callable[[float], str]) -> Cell:
        return make_cell(value, lambda number: brackets.format(text(number)), link)

    cells = [
        Cell(words.name_method(outcome.cell.method)),
        Cell(str(len(runs)), len(runs), link) if runs else Cell(),
        make_own(outcome.acc, lambda _: words.format_spread([run.acc for run in runs], 2)),
        _make_published_cell(numbers, "acc", 1.0, 2),
        _make_z_cell(outcome.acc_z, "" if "acc_std" in numbers else "~"),
        make_own(outcome.bwt, lambda value: words.format_number(value, 2)),
    ]
    if has_capacity:
        cells += [make_own(outcome.capacity, "{:.0f}".format), _make_published_cell(numbers, "capacity", 1.0, 0)]
    else:
        cells += [_make_published_cell(numbers, "bwt", 100.0, 0), _make_z_cell(outcome.bwt_z)]
    tone = {"agrees": "good", "off": "off"}.get(outcome.status, "")
    return [*cells, Cell(outcome.status, tone=tone, note=", ".join(outcome.differences))]


def _make_z_cell(z: float | None, mark: str = "") -> Cell:
    return make_cell(z, lambda value: words.format_signed(value, 1) + mark)


def _make_published_cell(numbers: Mapping[str, float], name: str, scale: float, digits: int) -> Cell:
    if name not in numbers:
        return Cell()
    value, deviation = scale * numbers[name], numbers.get(f"{name}_std")
    return Cell(words.format_deviation(value, None if deviation is None else scale * deviation, digits), value)


def make_results(benchmark: str, groups: Sequence[Group]) -> Table:
    """Make the table of all experiments on a benchmark.

    Args:
        benchmark: Name of the benchmark.
        groups: Groups of the benchmark.

    Returns:
        The table.
    """
    has_capacity = any(each.capacity != 100 for each in groups)
    columns = [Column("Method", numeric=False), Column("ACC (%)"), Column("BWT (%)"), Column("Runs")]
    columns += [Column("Capacity (%)")] if has_capacity else []
    columns += [Column("FWT against GPM"), Column("Time"), Column("Extra memory")]
    rows = [
        _make_result_row(each, groups, has_capacity=has_capacity)
        for method in METHODS
        for each in groups
        if each.method == method
    ]
    note = "Mean ± sample standard deviation. BWT and FWT are in points of accuracy, forgetting is negative."
    title = f"{words.name_benchmark(benchmark)}: all experiments"
    return Table(f"results-{benchmark}", title, columns, rows, note, benchmark)


def make_name_cell(each: Group) -> Cell:
    """Return the first cell of a group's row: its method, and what differs from others of the method."""
    return Cell(words.name_method(each.method), link=each.anchor, note=each.setting)


def _make_result_row(each: Group, groups: Sequence[Group], *, has_capacity: bool) -> list[Cell]:
    link, bwts = each.anchor, each.bwts
    reference = find_reference(each, groups)
    transfer = None
    if reference is not None and reference is not each:
        transfer = relative_fwt(each.accuracies, reference.accuracies)
    return [
        make_name_cell(each),
        Cell(words.format_spread(each.accs, 2), each.acc, link),
        Cell(words.format_spread(bwts, 2), sum(bwts) / len(bwts), link) if bwts else Cell(),
        Cell(each.repeats, len(each.runs), link),
        *([Cell(f"{each.capacity:.0f}", each.capacity, link)] if has_capacity else []),
        make_cell(transfer, lambda value: words.format_signed(value, 2), link),
        *make_cost_cells(each),
    ]


def make_cost_cells(each: Group) -> list[Cell]:
    """Return the cells of a group's time and memory."""
    size = words.format_size(each.extra_bytes)
    return [Cell(format_duration(each.seconds), each.seconds, each.anchor), Cell(size, each.extra_bytes, each.anchor)]


def make_times(groups: Sequence[Group]) -> Table | None:
    """Make the table of training time and extra memory relative to GPM's.

    Args:
        groups: Groups of all benchmarks.

    Returns:
        The table, with the groups that have a GPM of the same protocol; None if no group has.
    """
    rows = []
    for each in groups:
        reference = find_reference(each, groups)
        if reference is None:
            continue
        ratio = each.seconds / reference.seconds if reference.seconds else None
        memory = each.extra_bytes / reference.extra_bytes if reference.extra_bytes else None
        published = paper.times(each.benchmark).get(each.method) if not each.partial and not each.changes else None
        difference = None if ratio is None or published is None else ratio - published
        rows.append(
            [
                make_name_cell(each),
                Cell(words.name_benchmark(each.benchmark)),
                Cell(each.repeats, len(each.runs), each.anchor),
                make_cell(ratio, "{:.2f}".format, each.anchor),
                make_cell(published, "{:.2f}".format),
                make_cell(difference, lambda value: words.format_signed(value, 2)),
                make_cell(memory, "{:.3f}".format, each.anchor),
            ]
        )
    if not rows:
        return None
    columns = [Column("Method", numeric=False), Column("Benchmark", numeric=False)]
    columns += [Column("Runs"), Column("Time / GPM"), Column("Paper: time / GPM", paper=True), Column("Difference")]
    columns += [Column("Extra memory / GPM")]
    note = (
        "Wall time of whole runs, tests and checkpoints included, against GPM with the same tasks and epochs. The "
        "paper's times are of one GPU and have no spread; runs side by side on one machine slow each other down."
    )
    return Table("table5-time", "Table 5 of the paper: training time relative to GPM", columns, rows, note)


def make_datasets(groups: Sequence[Group]) -> Table | None:
    """Make the table of dataset statistics, as the runs recorded them.

    Args:
        groups: Groups of all benchmarks.

    Returns:
        The table; None if all runs are on games, which have no data sets.
    """
    groups = [each for each in groups if not each.is_game]
    if not groups:
        return None
    benchmarks = list(dict.fromkeys(each.benchmark for each in groups))
    columns = [Column("Statistic", numeric=False)]
    sides: list[tuple[dict[str, str], bool]] = []
    for benchmark in benchmarks:
        ours = _collect_statistics([each for each in groups if each.benchmark == benchmark])
        theirs = paper.table("datasets", benchmark)
        columns.append(Column(words.name_benchmark(benchmark)))
        sides.append((ours, False))
        if theirs:
            columns.append(Column(f"Paper: {words.name_benchmark(benchmark)}", paper=True))
            sides.append(({name: _format_dimension(value) for name, value in theirs.items()}, True))
    titles = {"tasks": "tasks"} | DATA
    rows = [
        [Cell(title), *(Cell(values.get(name, "")) for values, _ in sides)]
        for name, title in titles.items()
        if any(values.get(name) for values, _ in sides)
    ]
    note = "Ours is what the largest run recorded; runs of older versions did not record how large tasks are."
    return Table("table3-datasets", "Table 3 of the paper: dataset statistics", columns, rows, note, sortable=False)


def _collect_statistics(groups: Sequence[Group]) -> dict[str, str]:
    """Return the statistics of the run with the most tasks, preferably of one that recorded sizes."""
    largest = max(groups, key=lambda each: ("data" in each.first.tasks[0], len(each.first.names), each.is_whole))
    found: dict[str, set[str]] = {}
    for task in largest.first.tasks:
        for name, value in task.get("data", {}).items():
            found.setdefault(name, set()).add(_format_dimension(value))
    return {"tasks": str(len(largest.first.names))} | {name: " / ".join(sorted(seen)) for name, seen in found.items()}


def _format_dimension(value: Any) -> str:
    return " × ".join(map(str, value)) if isinstance(value, list) else f"{value:,}"


def make_settings(groups: Sequence[Group]) -> Table:
    """Make the table of hyper-parameters: learning rate and settings of the method, beside the paper's.

    Args:
        groups: Groups of all benchmarks.

    Returns:
        The table.
    """
    rows = []
    for each in groups:
        config, values = each.first.config, each.first.settings
        theirs = configure(config.benchmark, config.method).flat()
        shown = ["lr"] if config.method_settings is None else ["lr", "epochs", "batch", *vars(config.method_settings)]
        names = [name for name in shown if name in values]
        names += [
            name
            for name in values
            if name not in (*names, *KNOWN_ELSEWHERE) and name in theirs and theirs[name] != values[name]
        ]
        ours = {name: words.format_value(values[name]) for name in names}
        published = {name: words.format_value(theirs[name]) for name in names if name in theirs}
        different = {name: value for name, value in published.items() if value != ours[name]}
        rows.append(
            [
                Cell(words.name_method(each.method), link=each.anchor),
                Cell(words.name_benchmark(each.benchmark)),
                Cell(_list_values(ours)),
                Cell(_list_values(different) or "the same"),
            ]
        )
    columns = [
        Column("Method", numeric=False),
        Column("Benchmark", numeric=False),
        Column("Settings of the runs", numeric=False),
        Column("The paper's, where they differ", numeric=False, paper=True),
    ]
    title = "Table 4 of the paper: hyper-parameters"
    note = "The paper's are those of the preset “paper”; on benchmarks that it does not have, this package's own."
    return Table("table4-settings", title, columns, rows, note, sortable=False)


def _list_values(values: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in values.items())


# Settings of the run itself, which are in other columns.
KNOWN_ELSEWHERE = ("benchmark", "method", "preset", "recipe", *REPEATS, *TECHNICAL)
