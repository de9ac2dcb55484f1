"""The page of committed runs, made from their folders: ``python -m bench.results`` writes results/README.md."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, pstdev

from bench.row import as_ratio
from sgp import paper
from sgp.benchmarks.metrics import acc, bwt
from sgp.runs.config import AnyConfig, as_command
from sgp.runs.folder import RunFolder
from sgp.runs.game_summary import GameSummary, game_summary_of
from sgp.runs.games import GameConfig
from sgp.runs.summary import Summary, summary_of
from sgp.training.display import span

RESULTS = Path(__file__).parents[1] / "results"
PAGE = RESULTS / "README.md"
BEGIN, END = "<!-- made by python -m bench.results -->", "<!-- end -->"
TITLES = {
    "split-cifar100": "Split CIFAR-100",
    "cifar100-superclass": "CIFAR-100 Superclass",
    "split-miniimagenet": "Split miniImageNet",
    "fivetext": "Five text tasks, MiniLM",
    "clinc150": "CLINC150, MiniLM",
    "minatar": "MinAtar",
    "atari": "Atari",
}
HEADER = (
    "method",
    "preset",
    "recipe",
    "settings",
    "seeds",
    "tasks",
    "epochs",
    "ACC (%)",
    "BWT (%)",
    "capacity (%)",
    "kept (MB)",
    "time",
    "paper: ACC, BWT",
)
# What has a column of its own, or changes no number.
OWN_COLUMNS = ("--method", "--preset", "--recipe", "--seed", "--tasks", "--epochs", "--threads", "--steps", "--games")

Run = tuple[Path, Summary | GameSummary]


def runs() -> list[Run]:
    """Every committed run that has finished."""
    folders = [RunFolder(path) for path in sorted((RESULTS / "runs").glob("*"))]
    found: list[Run] = [
        (each.path, game_summary_of(each) if isinstance(each.config(), GameConfig) else summary_of(each))
        for each in folders
    ]
    return [(path, summary) for path, summary in found if summary.finished]


def tables() -> str:
    """Markdown: one table per benchmark, and the commands of its runs."""
    groups: dict[str, list[Run]] = {}  # by their command but for the seed
    for path, summary in runs():
        groups.setdefault(as_command(replace(summary.config, seed=0)), []).append((path, summary))
    lines: list[str] = []
    for benchmark, title in TITLES.items():
        own = sorted((g for g in groups.values() if g[0][1].config.benchmark == benchmark), key=_order)
        if own:
            lines += [f"### {title}", "", *_table(own), "", "```sh", *map(_command, own), "```", ""]
    return "\n".join([*lines, *_speeds()])


def _speeds() -> list[str]:
    """What ``make bench`` has measured."""
    measured = json.loads((RESULTS / "bench.json").read_text(encoding="utf-8"))
    machine = f"{measured['cpu']}, {measured['threads']} threads, torch {measured['torch']}, {measured['date'][:10]}"
    header = ["measured", "against", "ratio", "published", "goal"]
    rows = [
        [row["name"], row["against"], *(as_ratio(row[key]) for key in ("ratio", "published_ratio", "goal"))]
        for row in measured["rows"]
    ]
    caption = f"`make bench` on {machine}; medians over rounds taken in turns, all of them in [bench.json](bench.json)."
    return ["### Speed and memory", "", _line(header), _line(["---"] * 5), *map(_line, rows), "", caption, ""]


def _table(groups: list[list[Run]]) -> list[str]:
    games = [summary for group in groups for _, summary in group if isinstance(summary, GameSummary)]
    longest = max((summary.names for summary in games), key=len, default=[])
    header = [*HEADER[:5], "steps a game", *longest, "accumulated", "kept (MB)", "time"] if games else list(HEADER)
    rows = [_game_row(group, longest) if games else _row(group) for group in groups]
    return [_line(header), _line(["---"] * len(header)), *map(_line, rows)]


def _order(group: list[Run]) -> tuple[object, ...]:
    summary = group[0][1]
    config = summary.config
    epochs = config.training.epochs
    return (-len(summary.names), -epochs, config.preset, config.recipe, config.method, _settings(config))


def _command(group: list[Run]) -> str:
    """What gives the runs of a group, which differ in their seeds."""
    if len(group) == 1:
        return as_command(group[0][1].config)
    seeds = " ".join(str(summary.config.seed) for _, summary in group)
    return f"for seed in {seeds}; do {as_command(replace(group[0][1].config, seed=0))} --seed $seed; done"


def _row(group: list[Run]) -> list[object]:
    """Of supervised runs."""
    summaries = [summary for _, summary in group if isinstance(summary, Summary)]
    config, matrices = summaries[0].config, [summary.accuracies for summary in summaries]
    published = paper.numbers(config.benchmark, config.method)
    theirs = f"{published['acc']:.2f}" if published else ""
    theirs += f", {100 * published['bwt'] + 0.0:.1f}" if "bwt" in published else ""
    return [
        *_common(group),
        len(summaries[0].names),
        config.training.epochs,
        _spread([acc(matrix) for matrix in matrices]),
        _spread([bwt(matrix) for matrix in matrices]) if len(matrices[0]) > 1 else "",
        f"{mean(summary.capacity for summary in summaries):.0f}",
        _kept(summaries),
        _time(summaries),
        theirs,
    ]


def _game_row(group: list[Run], games: Sequence[str]) -> list[object]:
    """Of runs on games. Each game's cell is its score when it was learned, and after all."""
    summaries = [summary for _, summary in group if isinstance(summary, GameSummary)]
    config, cells = summaries[0].config, []
    for position, game in enumerate(games):
        if game not in summaries[0].names:
            cells.append("")
            continue
        then = mean(summary.learned[position].scores[position] for summary in summaries)
        after = mean(summary.learned[-1].scores[position] for summary in summaries)
        cells.append(f"{then:.1f} → {after:.1f}")
    ends = [summary.learned[-1].accumulated for summary in summaries]
    known = [end for end in ends if end is not None]
    return [
        *_common(group),
        f"{config.training.steps:,}",
        *cells,
        _spread(known) if len(known) == len(ends) else "",
        _kept(summaries),
        _time(summaries),
    ]


def _common(group: list[Run]) -> list[object]:
    """The first columns: which runs they are."""
    config = group[0][1].config
    seeds = ", ".join(f"[{summary.config.seed}](runs/{path.name})" for path, summary in group)
    return [config.method, config.preset, config.recipe, _settings(config), seeds]


def _settings(config: AnyConfig) -> str:
    """What else the command of a run says."""
    words = shlex.split(as_command(config))[3:]
    pairs = list(zip(words[::2], words[1::2], strict=True))
    return ", ".join(f"{flag.removeprefix('--')} {value}" for flag, value in pairs if flag not in OWN_COLUMNS)


def _spread(values: Sequence[float]) -> str:
    """The mean, and where there are several the standard deviation over them."""
    return f"{mean(values):.2f}" + (f" ± {pstdev(values):.2f}" if len(values) > 1 else "")


def _kept(summaries: Sequence[Summary | GameSummary]) -> str:
    """What is held beside the network, at the most."""
    return f"{max(sum(count for use, count in s.bytes.items() if use != 'network') for s in summaries) / 1e6:.1f}"


def _time(summaries: Sequence[Summary | GameSummary]) -> str:
    return span(mean(sum(summary.seconds.values()) for summary in summaries))


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def page(old: str) -> str:
    """The page with its tables made anew; what people wrote around them stays."""
    before, _, rest = old.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
