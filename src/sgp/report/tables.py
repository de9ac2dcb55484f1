"""The paper's tables for what was run: ours, the paper's and the difference, each in a column of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sgp import paper
from sgp.experiments.config import configure
from sgp.experiments.display import span
from sgp.experiments.record import REPEATS, TECHNICAL
from sgp.methods import METHODS
from sgp.report import words
from sgp.report.groups import Group, reference_of, relative_transfer

# Where a benchmark's numbers stand in the paper.
TABLES = {"split-cifar100": "Table 1", "split-miniimagenet": "Table 1", "cifar100-superclass": "Table 2"}
DATA = {
    "inputs": "input size",
    "classes": "classes per task",
    "train": "training examples per task",
    "validation": "validation examples per task",
    "test": "test examples per task",
}


@dataclass(frozen=True)
class Cell:
    """What stands in one place of a table.

    Attributes:
        text: for people.
        value: to sort by.
        link: anchor of what is behind it.
        note: a short remark beside it.
        tone: "good" or "off" for a difference inside or outside the paper's spread.
    """

    text: str = ""
    value: float | None = None
    link: str = ""
    note: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        title: of it.
        numeric: whether it is aligned to the right.
        paper: whether it is the paper's.
    """

    title: str
    numeric: bool = True
    paper: bool = False


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: of its files.
        title: its caption.
        note: what a reader should know.
        columns: of which the first names the row.
        rows: a cell for each column.
        benchmark: that it belongs to; empty for all.
        sortable: whether its rows have no order of their own.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    benchmark: str = ""
    sortable: bool = True


def results(benchmark: str, groups: Sequence[Group]) -> Table:
    """ACC and BWT with all rows of the paper, of which those that were not run are blank; then rows of ours."""
    own = groups
    published = {method: paper.numbers(benchmark, method) for of, method in paper.rows() if of == benchmark}
    published = {method: numbers for method, numbers in published.items() if numbers}
    has_capacity = any("capacity" in numbers for numbers in published.values()) or any(g.capacity != 100 for g in own)
    columns = [Column("Method", numeric=False), Column("ACC (%)"), Column("BWT (%)"), Column("Runs")]
    columns += [Column("Capacity (%)")] if has_capacity else []
    columns += [Column("FWT against GPM"), Column("Time"), Column("Extra memory")]
    if published:
        columns += [Column("Paper: ACC (%)", paper=True), Column("Difference"), Column("Paper: BWT (%)", paper=True)]
        columns += [Column("BWT difference")]
        columns += [Column("Paper: capacity (%)", paper=True)] if has_capacity else []

    rows: list[list[Cell]] = []
    beside = {each.method for each in own if each.published}
    for method in METHODS:
        for each in own:
            if each.method == method:
                row = _result(each, own, has_capacity=has_capacity)
                rows.append(row + (_published(each, has_capacity=has_capacity) if published else []))
        if method in published and method not in beside:
            ours = 6 + has_capacity
            theirs = _paper_cells(published[method], has_capacity=has_capacity)
            rows.append([Cell(words.method(method)), *[Cell()] * ours, *theirs])
    where = TABLES.get(benchmark)
    title = f"{where} of the paper: {words.benchmark(benchmark)}" if where else f"{words.benchmark(benchmark)}: results"
    note = "Mean ± sample standard deviation. BWT and differences are in points of accuracy, forgetting is negative."
    if published:
        note += " A row without numbers of ours was not run, or not in full. “Inside” means within the paper's spread."
    name = f"{where.lower().replace(' ', '')}-{benchmark}" if where else f"results-{benchmark}"
    return Table(name, title, columns, rows, note, benchmark)


def name_of(each: Group) -> Cell:
    """What stands in front of a group's row."""
    return Cell(words.method(each.method), link=each.anchor, note=each.setting)


def _result(each: Group, groups: Sequence[Group], *, has_capacity: bool) -> list[Cell]:
    link, bwts = each.anchor, each.bwts
    cells = [name_of(each), Cell(words.spread(each.accs, 2), each.acc, link)]
    cells.append(Cell(words.spread(bwts, 2), sum(bwts) / len(bwts), link) if bwts else Cell())
    cells.append(Cell(each.repeats, len(each.runs), link))
    if has_capacity:
        cells.append(Cell(f"{each.capacity:.0f}", each.capacity, link))
    reference = reference_of(each, groups)
    if reference is None or reference is each:
        cells.append(Cell())
    else:
        transfer = relative_transfer(each, reference)
        cells.append(Cell(words.signed(transfer, 2), transfer, link))
    cells.append(Cell(span(each.seconds), each.seconds, link))
    cells.append(Cell(words.size(each.extra_bytes), each.extra_bytes, link))
    return cells


def _paper_cells(numbers: dict[str, float], *, has_capacity: bool) -> list[Cell]:
    """The paper's columns, with the differences left blank."""
    cells = [_number(numbers, "acc", 1.0, 2), Cell(), _number(numbers, "bwt", 100.0, 1), Cell()]
    return cells + ([_number(numbers, "capacity", 1.0, 0)] if has_capacity else [])


def _published(each: Group, *, has_capacity: bool) -> list[Cell]:
    numbers = each.published
    cells = _paper_cells(numbers, has_capacity=has_capacity)
    cells[1] = _difference(each.acc, numbers, "acc", 1.0)
    if each.bwts:
        cells[3] = _difference(sum(each.bwts) / len(each.bwts), numbers, "bwt", 100.0)
    return cells


def _number(numbers: dict[str, float], name: str, scale: float, digits: int) -> Cell:
    if name not in numbers:
        return Cell()
    value = scale * numbers[name]
    text = words.number(value, digits)
    deviation = numbers.get(f"{name}_std")
    return Cell(text if deviation is None else f"{text} ± {scale * deviation:.{digits}f}", value)


def _difference(ours: float, numbers: dict[str, float], name: str, scale: float) -> Cell:
    """Ours minus the paper's, and whether that is within its deviation."""
    if name not in numbers:
        return Cell()
    difference = ours - scale * numbers[name]
    deviation = numbers.get(f"{name}_std")
    if deviation is None:
        return Cell(words.signed(difference, 2), difference, note="no spread given")
    # A deviation of 0.00 was rounded: half of the last digit is inside too.
    inside = abs(difference) <= max(scale * deviation, scale * (0.005 if name == "bwt" else 0.0))
    return Cell(
        words.signed(difference, 2),
        difference,
        note="inside" if inside else "outside",
        tone="good" if inside else "off",
    )


def times(groups: Sequence[Group]) -> Table | None:
    """Training time and extra memory relative to GPM's, of groups that have a GPM to be compared with."""
    rows = []
    for each in groups:
        reference = reference_of(each, groups)
        if reference is None:
            continue
        ratio = each.seconds / reference.seconds if reference.seconds else None
        memory = each.extra_bytes / reference.extra_bytes if reference.extra_bytes else None
        published = paper.times(each.benchmark).get(each.method) if not each.partial and not each.changes else None
        rows.append(
            [
                name_of(each),
                Cell(words.benchmark(each.benchmark)),
                Cell(each.repeats, len(each.runs), each.anchor),
                Cell() if ratio is None else Cell(f"{ratio:.2f}", ratio, each.anchor),
                Cell() if published is None else Cell(f"{published:.2f}", published),
                Cell()
                if ratio is None or published is None
                else Cell(words.signed(ratio - published, 2), ratio - published),
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


def datasets(groups: Sequence[Group]) -> Table | None:
    """How large the tasks were, as the runs have written it down; games have no data sets."""
    groups = [each for each in groups if not each.is_game]
    if not groups:
        return None
    benchmarks = list(dict.fromkeys(each.benchmark for each in groups))
    columns = [Column("Statistic", numeric=False)]
    sides: list[tuple[dict[str, str], bool]] = []
    for benchmark in benchmarks:
        ours = _data_of([each for each in groups if each.benchmark == benchmark])
        theirs = paper.table("datasets", benchmark)
        columns.append(Column(words.benchmark(benchmark)))
        sides.append((ours, False))
        if theirs:
            columns.append(Column(f"Paper: {words.benchmark(benchmark)}", paper=True))
            sides.append(({name: _dimension(value) for name, value in theirs.items()}, True))
    titles = {"tasks": "tasks"} | DATA
    rows = [
        [Cell(title), *(Cell(values.get(name, "")) for values, _ in sides)]
        for name, title in titles.items()
        if any(values.get(name) for values, _ in sides)
    ]
    note = (
        "Ours is what the largest run has written down; runs of older versions did not write down how large tasks are."
    )
    return Table("table3-datasets", "Table 3 of the paper: dataset statistics", columns, rows, note, sortable=False)


def _data_of(groups: Sequence[Group]) -> dict[str, str]:
    """Of the run with the most tasks, and if it can be one that tells the sizes."""
    largest = max(groups, key=lambda each: ("data" in each.first.tasks[0], len(each.first.names), each.is_whole))
    found: dict[str, set[str]] = {}
    for task in largest.first.tasks:
        for name, value in task.get("data", {}).items():
            found.setdefault(name, set()).add(_dimension(value))
    return {"tasks": str(len(largest.first.names))} | {name: " / ".join(sorted(seen)) for name, seen in found.items()}


def _dimension(value: Any) -> str:
    return " × ".join(map(str, value)) if isinstance(value, list) else f"{value:,}"


def settings(groups: Sequence[Group]) -> Table:
    """Hyper-parameters: of each group its learning rate and its method's settings, beside the paper's."""
    rows = []
    for each in groups:
        config = each.first.config
        theirs = configure(config.benchmark, config.method).flat()
        own = config.method_settings
        shown = ["lr"] if own is None else ["lr", "epochs", "batch", *vars(own)]
        ours = {name: words.plain(each.first.settings[name]) for name in shown if name in each.first.settings}
        rest = {
            name: words.plain(value)
            for name, value in each.first.settings.items()
            if name not in ours and name in theirs and theirs[name] != value and name not in (*KNOWN_ELSEWHERE,)
        }
        published = {name: words.plain(theirs[name]) for name in [*ours, *rest] if name in theirs}
        rows.append(
            [
                Cell(words.method(each.method), link=each.anchor),
                Cell(words.benchmark(each.benchmark)),
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


# Of the run itself, and told in other columns.
KNOWN_ELSEWHERE = ("benchmark", "method", "preset", "recipe", *REPEATS, *TECHNICAL)
