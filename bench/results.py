"""Write the tables of the documentation from the folders of committed runs: ``python -m bench.results``.

It fills results/README.md, the tables of each method on its page in docs/methods, and the comparison of methods on a
pretrained encoder in docs/fine-tune.md.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bench.row import as_ratio
from sgp import paper
from sgp.benchmarks.metrics import acc, bwt
from sgp.experiments.callbacks import format_duration
from sgp.experiments.config import Config, as_command
from sgp.experiments.folder import RunFolder
from sgp.experiments.summary import Summary, read_summary
from sgp.methods import METHODS
from sgp.report.collect import collect_runs
from sgp.report.groups import group_runs
from sgp.report.tables import Table, make_paper_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGE = RESULTS / "README.md"
PAGES = ROOT / "docs" / "methods"
FINE_TUNE = ROOT / "docs" / "fine-tune.md"
BEGIN, END = "<!-- made by python -m bench.results -->", "<!-- end -->"
TITLES = {
    "split-cifar100": "Split CIFAR-100",
    "cifar100-superclass": "CIFAR-100 Superclass",
    "split-miniimagenet": "Split miniImageNet",
    "digits": "Digits",
    "fivetext": "Five text tasks, MiniLM",
    "clinc150": "CLINC150, MiniLM",
    "minatar": "MinAtar",
    "atari": "Atari",
}
# Columns of the table that leads a benchmark, and of the folded table of all experiments; games have others.
BEST = ("method", "ACC (%)", "BWT (%)", "seeds", "paper: ACC, BWT", "tasks", "epochs", "settings")
BEST_OF_GAMES = ("method", "accumulated", "seeds", "games", "steps a game", "settings")
COLUMNS = (
    *("method", "settings", "seeds", "tasks", "epochs", "ACC (%)", "BWT (%)"),
    *("capacity (%)", "stored (MB)", "time"),
)
FEW = ("benchmark", "settings", "tasks", "epochs", "runs", "ACC (%)", "BWT (%)", "stored (MB)")
OF_PAPER = ("benchmark", "ACC (%)", "BWT (%)", "capacity (%)")
OF_TEXTS = ("method", "settings", "runs", "ACC (%)", "BWT (%)", "stored (MB)", "time of a step")
FEW_OF_GAMES = ("benchmark", "games", "steps a game", "runs", "accumulated", "stored (MB)")
# Options that have a column of their own, or change no number.
OWN_COLUMNS = ("--method", "--seed", "--tasks", "--epochs", "--threads", "--steps", "--games")

Run = tuple[Path, Summary]


def read_runs() -> list[Run]:
    """Return every committed run that is finished."""
    found = [(path, read_summary(RunFolder(path))) for path in sorted((RESULTS / "runs").glob("*"))]
    return [(path, summary) for path, summary in found if summary.finished]


def group_by_experiment() -> dict[str, list[list[Run]]]:
    """Return groups of runs that differ only in their seed, by benchmark, in the order in which they are shown."""
    groups: dict[str, list[Run]] = {}
    for path, summary in sorted(read_runs(), key=lambda run: run[1].config.seed):
        groups.setdefault(as_command(replace(summary.config, seed=0)), []).append((path, summary))
    return {
        benchmark: sorted((g for g in groups.values() if g[0][1].config.benchmark == benchmark), key=_get_sort_key)
        for benchmark in TITLES
    }


def make_page(groups: Mapping[str, list[list[Run]]]) -> str:
    """Return the tables of results/README.md: of each benchmark the best of each method, then what is behind it."""
    lines: list[str] = []
    reported = group_runs(collect_runs([RESULTS / "runs"]).runs)
    for benchmark, own in groups.items():
        if not own:
            continue
        is_game = own[0][0][1].config.is_game
        best = [_make_row(group) for group in _choose_best(own)]
        lines += [f"### {TITLES[benchmark]}", "", *_format_table(BEST_OF_GAMES if is_game else BEST, best), ""]
        table = make_paper_table(benchmark, [each for each in reported if each.benchmark == benchmark])
        if table is not None:
            lines += _fold(f"{table.title}, row by row", [*_format_report_table(table), "", table.note])
        columns = _list_game_columns(own) if is_game else _list_columns(own)
        every = _format_table(columns, [_make_row(group) for group in own])
        commands = ["```sh", *map(_format_command, own), "```"]
        lines += _fold(f"All {len(own)} experiments and their commands", [*every, "", *commands])
    return "\n".join([*lines, *_format_speeds()])


def _choose_best(groups: list[list[Run]]) -> list[list[Run]]:
    """Return the best group of each method among its groups with the most tasks, longest streams and best ACC first."""

    def rank(group: list[Run]) -> tuple[float, ...]:
        return len(group[0][1].names), _compute_score(group)

    methods = dict.fromkeys(group[0][1].config.method for group in groups)
    best = [max((g for g in groups if g[0][1].config.method == method), key=rank) for method in methods]
    return sorted(best, key=rank, reverse=True)


def _compute_score(group: list[Run]) -> float:
    """Return the mean ACC of a group, or its mean accumulated reward."""
    if group[0][1].config.is_game:
        return mean(summary.last["accumulated"] or 0.0 for _, summary in group)
    return mean(acc(summary.accuracies) for _, summary in group)


def _fold(summary: str, lines: Sequence[str]) -> list[str]:
    """Return lines of Markdown that are shown when the summary is opened."""
    return ['<details markdown="1">', f"<summary>{summary}</summary>", "", *lines, "", "</details>", ""]


def _format_report_table(table: Table) -> list[str]:
    columns = [column.title for column in table.columns]
    rows = [
        [f"{cell.text}: {cell.note}" if cell.note else cell.text for cell in row]  # a note says what a run lacks
        for row in table.rows
    ]
    return _format_table(columns, [dict(zip(columns, row, strict=True)) for row in rows])


def make_method_tables(groups: Mapping[str, list[list[Run]]], method: str) -> str:
    """Return the tables of a method's page: the paper's numbers, and what was measured here."""
    own = [group for benchmark in groups.values() for group in benchmark if group[0][1].config.method == method]
    published = [_format_published(benchmark, method) for benchmark in groups if paper.numbers(benchmark, method)]
    parts = ["In the paper:", "\n".join(_format_table(OF_PAPER, published))] if published else []
    parts += ["Measured here; runs and commands are in [results](../../results/README.md):"] if own else []
    for is_game, columns in ((False, FEW), (True, FEW_OF_GAMES)):
        rows = [_make_row(group) for group in own if group[0][1].config.is_game == is_game]
        parts += ["\n".join(_format_table(columns, rows))] if rows else []
    return "\n\n".join(parts)


def make_comparison(groups: Mapping[str, list[list[Run]]]) -> str:
    """Return the tables of methods on a pretrained encoder, the best first.

    The time of a step is relative to that of finetuning.
    """
    measured = _read_measurements()["rows"]
    steps = {row["name"].removeprefix("MiniLM step, "): row["ratio"] for row in measured} | {"finetune": 1.0}
    parts = []
    for benchmark in ("fivetext", "clinc150"):
        own = sorted(groups[benchmark], key=_compute_score, reverse=True)
        rows = [_make_row(group) | {"time of a step": as_ratio(steps.get(_name_in_bench(group)))} for group in own]
        parts += [f"**{TITLES[benchmark]}**", "\n".join(_format_table(OF_TEXTS, rows))] if rows else []
    return "\n\n".join(parts)


def _name_in_bench(group: list[Run]) -> str:
    config = group[0][1].config
    every = getattr(config.method_settings, "project_every", 1)
    return config.method if every == 1 else f"{config.method}, project_every={every}"


def _read_measurements() -> dict[str, Any]:
    """Return the measurements of ``make bench``."""
    measured: dict[str, Any] = json.loads((RESULTS / "bench.json").read_text(encoding="utf-8"))
    return measured


def _format_speeds() -> list[str]:
    """Return the measurements of ``make bench`` as a table."""
    measured = _read_measurements()
    machine = f"{measured['cpu']}, {measured['threads']} threads, torch {measured['torch']}, {measured['date'][:10]}"
    ratios = {"ratio": "ratio", "published": "published_ratio", "goal": "goal"}
    rows = [
        {"measured": row["name"], "against": row["against"]}
        | {column: as_ratio(row[key]) for column, key in ratios.items()}
        for row in measured["rows"]
    ]
    caption = f"`make bench` on {machine}; medians over interleaved rounds, all of them in [bench.json](bench.json)."
    return ["### Speed and memory", "", *_format_table(("measured", "against", *ratios), rows), "", caption, ""]


def _format_table(columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return a table as lines of Markdown. A row is blank in a column that it does not have."""
    lines = [columns, ["---"] * len(columns), *([row.get(column, "") for column in columns] for row in rows)]
    return ["| " + " | ".join(map(str, cells)) + " |" for cells in lines]


def _list_columns(groups: list[list[Run]]) -> tuple[str, ...]:
    """Return the columns of all experiments; capacity is one where a network grows."""
    grows = any(summary.last["capacity"] != 100 for group in groups for _, summary in group)
    return tuple(column for column in COLUMNS if grows or column != "capacity (%)")


def _list_game_columns(groups: list[list[Run]]) -> tuple[str, ...]:
    names = dict.fromkeys(name for group in groups for _, summary in group for name in summary.names)
    return "method", "settings", "seeds", "steps a game", *names, "accumulated", "time"


def _get_sort_key(group: list[Run]) -> tuple[object, ...]:
    summary = group[0][1]
    config = summary.config
    epochs = config.trainer.epochs
    return (-len(summary.names), -epochs, config.preset, config.recipe, config.method, _describe_settings(config))


def _format_command(group: list[Run]) -> str:
    """Return the command that makes the runs of a group, which differ in their seeds."""
    if len(group) == 1:
        return as_command(group[0][1].config)
    seeds = " ".join(str(summary.config.seed) for _, summary in group)
    return f"for seed in {seeds}; do {as_command(replace(group[0][1].config, seed=0))} --seed $seed; done"


def _make_row(group: list[Run]) -> dict[str, object]:
    """Return the cells of runs that differ in their seeds, by column."""
    summaries = [summary for _, summary in group]
    config = summaries[0].config
    common = {
        "benchmark": TITLES[config.benchmark],
        "method": config.method,
        "settings": _describe_settings(config),
        "seeds": ", ".join(f"[{summary.config.seed}](runs/{path.name})" for path, summary in group),
        "runs": len(group),
        "stored (MB)": f"{max(summary.extra_bytes for summary in summaries) / 1e6:.1f}",
        "time": format_duration(mean(sum(summary.seconds.values()) for summary in summaries)),
    }
    return common | (_summarize_games if config.is_game else _summarize_tasks)(summaries)


def _summarize_tasks(summaries: list[Summary]) -> dict[str, object]:
    config, matrices = summaries[0].config, [summary.accuracies for summary in summaries]
    at_once = METHODS[config.method].trains_jointly
    published = _format_published(config.benchmark, config.method)
    theirs = [str(published[column]) for column in ("ACC (%)", "BWT (%)") if column in published]
    return {
        "tasks": len(summaries[0].names),
        "epochs": config.trainer.epochs,
        "ACC (%)": _format_spread([acc(matrix) for matrix in matrices]),
        "BWT (%)": "" if at_once or len(matrices[0]) < 2 else _format_spread([bwt(matrix) for matrix in matrices]),
        "capacity (%)": f"{mean(summary.last['capacity'] for summary in summaries):.0f}",
        # Kept on one line where a column is narrow.
        "paper: ACC, BWT": ", ".join(theirs).replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"),
    }


def _format_published(benchmark: str, method: str) -> dict[str, object]:
    numbers = paper.numbers(benchmark, method)
    found: dict[str, object] = {"benchmark": TITLES[benchmark]}
    if "acc" in numbers:
        found["ACC (%)"] = f"{numbers['acc']:.2f}" + (f" ± {numbers['acc_std']:.2f}" if "acc_std" in numbers else "")
    if "bwt" in numbers:
        found["BWT (%)"] = f"{100 * numbers['bwt'] + 0.0:.1f}"
    if "capacity" in numbers:
        found["capacity (%)"] = f"{numbers['capacity']:.0f}"
    return found


def _summarize_games(summaries: list[Summary]) -> dict[str, object]:
    """Return the cells of games: the score of each when it was learned, and after all games."""
    cells: dict[str, object] = {}
    for position, game in enumerate(summaries[0].names):
        then = mean(summary.tasks[position]["scores"][position] for summary in summaries)
        after = mean(summary.last["scores"][position] for summary in summaries)
        cells[game] = f"{then:.1f} → {after:.1f}"
    ends = [summary.last["accumulated"] for summary in summaries]
    known = [end for end in ends if end is not None]
    return cells | {
        "games": len(summaries[0].names),
        "steps a game": f"{summaries[0].config.trainer.steps:,}",
        "accumulated": _format_spread(known) if len(known) == len(ends) else "",
    }


def _describe_settings(config: Config[Any]) -> str:
    """Return the options of a run's command that have no column of their own."""
    options = as_command(config).split(" --")[1:]
    return ", ".join(option for option in options if f"--{option.split(maxsplit=1)[0]}" not in OWN_COLUMNS)


def _format_spread(values: Sequence[float]) -> str:
    """Return the mean of values as text, and of several values the standard deviation."""
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def make_pages() -> dict[Path, str]:
    """Return every page with new tables, and unchanged text around them."""
    groups = group_by_experiment()
    methods = [path for path in PAGES.glob("*.md") if path.stem != "index"]
    made = {PAGE: make_page(groups), FINE_TUNE: make_comparison(groups)}
    made |= {path: make_method_tables(groups, path.stem) for path in methods}
    return {path: _fill(path.read_text(encoding="utf-8"), made[path]) for path in made}


def _fill(old: str, tables: str) -> str:
    before, _, rest = old.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables.rstrip()}\n\n{END}{after}"


if __name__ == "__main__":
    for path, text in make_pages().items():
        path.write_text(text, encoding="utf-8")
