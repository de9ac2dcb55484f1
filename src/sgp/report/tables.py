"""Tables of a report: the paper's tables with our runs beside them, and all experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgp import paper
from sgp.experiments.callbacks import span
from sgp.experiments.config import configure
from sgp.experiments.record import REPEATS, TECHNICAL
from sgp.methods import METHODS
from sgp.report import words
from sgp.report.groups import Group, compute_relative_transfer, find_reference
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
    rows = []
    for outcome in outcomes:
        link = anchors[outcome.runs[0].path] if outcome.runs else ""
        rows.append(_make_paper_row(outcome, link, has_capacity=has_capacity))
    title = f"Table {cells[0].table[-1]} of the paper: {words.name_benchmark(benchmark)}"
    note = f"{EXPLANATION} {explain_spread(outcomes)}".strip()
    note += " Numbers in brackets are of partial runs, and not compared."
    return Table(f"{cells[0].table}-{benchmark}", title, columns, rows, note, benchmark)


def _make_paper_row(outcome: Outcome, link: str, *, has_capacity: bool) -> list[Cell]:
    numbers = outcome.cell.numbers
    runs = outcome.runs
    ours = {
        "acc": words.format_spread([run.acc for run in runs], 2) if runs else "",
        "bwt": "" if outcome.bwt is None else words.format_number(outcome.bwt, 2),
        "capacity": "" if outcome.capacity is None else f"{outcome.capacity:.0f}",
    }
    values = {"acc": outcome.acc, "bwt": outcome.bwt, "capacity": outcome.capacity}
    if outcome.status == "partial":
        ours = {name: f"({text})" if text else "" for name, text in ours.items()}
    own = {name: Cell(text, values[name], link) if text else Cell() for name, text in ours.items()}
    stands_in = "" if "acc_std" in numbers else "~"
    tone = {"agrees": "good", "off": "off"}.get(outcome.status, "")
    cells = [
        Cell(words.name_method(outcome.cell.method)),
        Cell(str(len(runs)), len(runs), link) if runs else Cell(),
        own["acc"],
        _make_published_cell(numbers, "acc", 1.0, 2),
        _make_z_cell(outcome.acc_z, stands_in),
        own["bwt"],
    ]
    if has_capacity:
        cells += [own["capacity"], _make_published_cell(numbers, "capacity", 1.0, 0)]
    else:
        cells += [_make_published_cell(numbers, "bwt", 100.0, 0), _make_z_cell(outcome.bwt_z)]
    return [*cells, Cell(outcome.status, tone=tone, note=", ".join(outcome.differences))]


def _make_z_cell(z: float | None, mark: str = "") -> Cell:
    return Cell() if z is None else Cell(words.format_signed(z, 1) + mark, z)


def _make_published_cell(numbers: Mapping[str, float], name: str, scale: float, digits: int) -> Cell:
    if name not in numbers:
        return Cell()
    value = scale * numbers[name]
    text = words.format_number(value, digits)
    deviation = numbers.get(f"{name}_std")
    return Cell(text if deviation is None else f"{text} ± {scale * deviation:.{digits}f}", value)


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
    cells = [make_name_cell(each), Cell(words.format_spread(each.accs, 2), each.acc, link)]
    cells.append(Cell(words.format_spread(bwts, 2), sum(bwts) / len(bwts), link) if bwts else Cell())
    cells.append(Cell(each.repeats, len(each.runs), link))
    if has_capacity:
        cells.append(Cell(f"{each.capacity:.0f}", each.capacity, link))
    reference = find_reference(each, groups)
    if reference is None or reference is each:
        cells.append(Cell())
    else:
        transfer = compute_relative_transfer(each, reference)
        cells.append(Cell(words.format_signed(transfer, 2), transfer, link))
    cells.append(Cell(span(each.seconds), each.seconds, link))
    cells.append(Cell(words.format_size(each.extra_bytes), each.extra_bytes, link))
    return cells


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
        rows.append(
            [
                make_name_cell(each),
                Cell(words.name_benchmark(each.benchmark)),
                Cell(each.repeats, len(each.runs), each.anchor),
                Cell() if ratio is None else Cell(f"{ratio:.2f}", ratio, each.anchor),
                Cell() if published is None else Cell(f"{published:.2f}", published),
                Cell()
                if ratio is None or published is None
                else Cell(words.format_signed(ratio - published, 2), ratio - published),
                Cell() if memory is None else Cell(f"{memory:.3f}", memory, each.anchor),
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
        config = each.first.config
        theirs = configure(config.benchmark, config.method).flat()
        own = config.method_settings
        shown = ["lr"] if own is None else ["lr", "epochs", "batch", *vars(own)]
        ours = {name: words.format_value(each.first.settings[name]) for name in shown if name in each.first.settings}
        rest = {
            name: words.format_value(value)
            for name, value in each.first.settings.items()
            if name not in ours and name in theirs and theirs[name] != value and name not in (*KNOWN_ELSEWHERE,)
        }
        published = {name: words.format_value(theirs[name]) for name in [*ours, *rest] if name in theirs}
        rows.append(
            [
                Cell(words.name_method(each.method), link=each.anchor),
                Cell(words.name_benchmark(each.benchmark)),
                Cell("; ".join(f"{name}: {value}" for name, value in (ours | rest).items())),
                Cell(
                    "; ".join(
                        f"{name}: {value}" for name, value in published.items() if value != (ours | rest).get(name)
                    )
                    or "the same"
                ),
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


# Settings of the run itself, which are in other columns.
KNOWN_ELSEWHERE = ("benchmark", "method", "preset", "recipe", *REPEATS, *TECHNICAL)
