"""What committed runs say, made from their folders.

``python -m bench.results`` writes results/README.md, the figures of each method on its page in docs/methods, and how
methods compare on a pretrained encoder in docs/fine-tune.md.
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
from sgp.experiments.config import AnyConfig, GameConfig, as_command
from sgp.experiments.display import span
from sgp.experiments.folder import RunFolder
from sgp.experiments.game_summary import GameSummary, read_game_summary
from sgp.experiments.summary import Summary, read_summary
from sgp.methods import METHODS

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
# Columns of the large table, and those of the small one on a method's page; games have others.
WHICH = ("method", "preset", "recipe", "settings", "seeds")
COLUMNS = ("tasks", "epochs", "ACC (%)", "BWT (%)", "capacity (%)", "kept (MB)", "time", "paper: ACC, BWT")
FEW = ("benchmark", "preset", "recipe", "settings", "tasks", "epochs", "runs", "ACC (%)", "BWT (%)", "kept (MB)")
OF_PAPER = ("benchmark", "ACC (%)", "BWT (%)", "capacity (%)")
OF_TEXTS = ("method", "settings", "runs", "ACC (%)", "BWT (%)", "kept (MB)", "time of a step")
FEW_OF_GAMES = ("benchmark", "games", "steps a game", "runs", "accumulated", "kept (MB)")
# What has a column of its own, or changes no number.
OWN_COLUMNS = ("--method", "--preset", "--recipe", "--seed", "--tasks", "--epochs", "--threads", "--steps", "--games")

Run = tuple[Path, Summary | GameSummary]


def runs() -> list[Run]:
    """Every committed run that has finished."""
    folders = [RunFolder(path) for path in sorted((RESULTS / "runs").glob("*"))]
    found: list[Run] = [
        (each.path, read_game_summary(each) if isinstance(each.read_config(), GameConfig) else read_summary(each))
        for each in folders
    ]
    return [(path, summary) for path, summary in found if summary.finished]


def grouped() -> dict[str, list[list[Run]]]:
    """Runs that differ in their seed alone together, by benchmark, in the order in which they are shown."""
    groups: dict[str, list[Run]] = {}
    for path, summary in sorted(runs(), key=lambda run: run[1].config.seed):
        groups.setdefault(as_command(replace(summary.config, seed=0)), []).append((path, summary))
    return {
        benchmark: sorted((g for g in groups.values() if g[0][1].config.benchmark == benchmark), key=_order)
        for benchmark in TITLES
    }


def tables(groups: Mapping[str, list[list[Run]]]) -> str:
    """Markdown: one table per benchmark, and the commands of its runs."""
    lines: list[str] = []
    for benchmark, own in groups.items():
        if own:
            columns = (*WHICH, *_columns(own))
            lines += [f"### {TITLES[benchmark]}", "", *_table(columns, [_row(group) for group in own]), ""]
            lines += ["```sh", *map(_command, own), "```", ""]
    return "\n".join([*lines, *_speeds()])


def figures(groups: Mapping[str, list[list[Run]]], method: str) -> str:
    """Markdown: what one method has reached, in the paper and here."""
    own = [group for benchmark in groups.values() for group in benchmark if group[0][1].config.method == method]
    published = [_of_paper(benchmark, method) for benchmark in groups if paper.numbers(benchmark, method)]
    parts = ["In the paper:", "\n".join(_table(OF_PAPER, published))] if published else []
    parts += ["Measured here; runs and commands are in [results](../../results/README.md):"] if own else []
    for kind, columns in ((Summary, FEW), (GameSummary, FEW_OF_GAMES)):
        rows = [_row(group) for group in own if isinstance(group[0][1], kind)]
        parts += ["\n".join(_table(columns, rows))] if rows else []
    return "\n\n".join(parts)


def comparison(groups: Mapping[str, list[list[Run]]]) -> str:
    """Markdown: methods on a pretrained encoder, the best first; a step's time is against finetuning's."""
    steps = {row["name"].removeprefix("MiniLM step, "): row["ratio"] for row in _measured()["rows"]} | {"finetune": 1.0}
    parts = []
    for benchmark in ("fivetext", "clinc150"):
        own = sorted(groups[benchmark], key=_mean_acc, reverse=True)
        rows = [_row(group) | {"time of a step": as_ratio(steps.get(_name_in_bench(group)))} for group in own]
        parts += [f"**{TITLES[benchmark]}**", "\n".join(_table(OF_TEXTS, rows))] if rows else []
    return "\n\n".join(parts)


def _mean_acc(group: list[Run]) -> float:
    return mean(acc(summary.accuracies) for _, summary in group if isinstance(summary, Summary))


def _name_in_bench(group: list[Run]) -> str:
    config = group[0][1].config
    every = getattr(config.method_settings, "project_every", 1)
    return config.method if every == 1 else f"{config.method}, project_every={every}"


def _measured() -> dict[str, Any]:
    """What ``make bench`` has measured."""
    measured: dict[str, Any] = json.loads((RESULTS / "bench.json").read_text(encoding="utf-8"))
    return measured


def _speeds() -> list[str]:
    """What ``make bench`` has measured, in a table."""
    measured = _measured()
    machine = f"{measured['cpu']}, {measured['threads']} threads, torch {measured['torch']}, {measured['date'][:10]}"
    ratios = {"ratio": "ratio", "published": "published_ratio", "goal": "goal"}
    rows = [
        {"measured": row["name"], "against": row["against"]}
        | {column: as_ratio(row[key]) for column, key in ratios.items()}
        for row in measured["rows"]
    ]
    caption = f"`make bench` on {machine}; medians over rounds taken in turns, all of them in [bench.json](bench.json)."
    return ["### Speed and memory", "", *_table(("measured", "against", *ratios), rows), "", caption, ""]


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Lines of Markdown. A row has nothing to say in a column that it does not know."""
    lines = [columns, ["---"] * len(columns), *([row.get(column, "") for column in columns] for row in rows)]
    return ["| " + " | ".join(map(str, cells)) + " |" for cells in lines]


def _columns(groups: list[list[Run]]) -> tuple[str, ...]:
    """After those that say which runs a row is of."""
    games = [summary for group in groups for _, summary in group if isinstance(summary, GameSummary)]
    if not games:
        return COLUMNS
    names = dict.fromkeys(name for summary in games for name in summary.names)
    return "steps a game", *names, "accumulated", "kept (MB)", "time"


def _order(group: list[Run]) -> tuple[object, ...]:
    summary = group[0][1]
    config = summary.config
    epochs = config.trainer.epochs
    return (-len(summary.names), -epochs, config.preset, config.recipe, config.method, _settings(config))


def _command(group: list[Run]) -> str:
    """What gives the runs of a group, which differ in their seeds."""
    if len(group) == 1:
        return as_command(group[0][1].config)
    seeds = " ".join(str(summary.config.seed) for _, summary in group)
    return f"for seed in {seeds}; do {as_command(replace(group[0][1].config, seed=0))} --seed $seed; done"


def _row(group: list[Run]) -> dict[str, object]:
    """What runs that differ in their seeds say, by column."""
    summaries = [summary for _, summary in group]
    config = summaries[0].config
    common = {
        "benchmark": TITLES[config.benchmark],
        "method": config.method,
        "preset": config.preset,
        "recipe": config.recipe,
        "settings": _settings(config),
        "seeds": ", ".join(f"[{summary.config.seed}](runs/{path.name})" for path, summary in group),
        "runs": len(group),
        "kept (MB)": f"{max(map(_kept, summaries)) / 1e6:.1f}",
        "time": span(mean(sum(summary.seconds.values()) for summary in summaries)),
    }
    images = [summary for summary in summaries if isinstance(summary, Summary)]
    games = [summary for summary in summaries if isinstance(summary, GameSummary)]
    return common | (_of_games(games) if games else _of_tasks(images))


def _of_tasks(summaries: list[Summary]) -> dict[str, object]:
    config, matrices = summaries[0].config, [summary.accuracies for summary in summaries]
    at_once = METHODS[config.method].trains_jointly
    published = _of_paper(config.benchmark, config.method)
    theirs = [str(published[column]) for column in ("ACC (%)", "BWT (%)") if column in published]
    return {
        "tasks": len(summaries[0].names),
        "epochs": config.trainer.epochs,
        "ACC (%)": _spread([acc(matrix) for matrix in matrices]),
        "BWT (%)": "" if at_once or len(matrices[0]) < 2 else _spread([bwt(matrix) for matrix in matrices]),
        "capacity (%)": f"{mean(summary.capacity for summary in summaries):.0f}",
        "paper: ACC, BWT": ", ".join(theirs),
    }


def _of_paper(benchmark: str, method: str) -> dict[str, object]:
    numbers = paper.numbers(benchmark, method)
    found: dict[str, object] = {"benchmark": TITLES[benchmark]}
    if "acc" in numbers:
        found["ACC (%)"] = f"{numbers['acc']:.2f}" + (f" ± {numbers['acc_std']:.2f}" if "acc_std" in numbers else "")
    if "bwt" in numbers:
        found["BWT (%)"] = f"{100 * numbers['bwt'] + 0.0:.1f}"
    if "capacity" in numbers:
        found["capacity (%)"] = f"{numbers['capacity']:.0f}"
    return found


def _of_games(summaries: list[GameSummary]) -> dict[str, object]:
    """Each game's cell is its score when it was learned, and after all."""
    cells: dict[str, object] = {}
    for position, game in enumerate(summaries[0].names):
        then = mean(summary.learned[position].scores[position] for summary in summaries)
        after = mean(summary.learned[-1].scores[position] for summary in summaries)
        cells[game] = f"{then:.1f} → {after:.1f}"
    ends = [summary.learned[-1].accumulated for summary in summaries]
    known = [end for end in ends if end is not None]
    return cells | {
        "games": len(summaries[0].names),
        "steps a game": f"{summaries[0].config.trainer.steps:,}",
        "accumulated": _spread(known) if len(known) == len(ends) else "",
    }


def _settings(config: AnyConfig) -> str:
    """What else the command of a run says."""
    options = as_command(config).split(" --")[1:]
    return ", ".join(option for option in options if f"--{option.split(maxsplit=1)[0]}" not in OWN_COLUMNS)


def _spread(values: Sequence[float]) -> str:
    """The mean, and where there are several the standard deviation over them."""
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def _kept(summary: Summary | GameSummary) -> int:
    """Bytes held beside the network, at the most."""
    return sum(count for use, count in summary.bytes.items() if use != "network")


def pages() -> dict[Path, str]:
    """Every page with its tables made anew; what people wrote around them stays."""
    groups = grouped()
    methods = [path for path in PAGES.glob("*.md") if path.stem != "index"]
    made = {PAGE: tables(groups), FINE_TUNE: comparison(groups)}
    made |= {path: figures(groups, path.stem) for path in methods}
    return {path: _filled(path.read_text(encoding="utf-8"), made[path]) for path in made}


def _filled(old: str, tables: str) -> str:
    before, _, rest = old.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables.rstrip()}\n\n{END}{after}"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
