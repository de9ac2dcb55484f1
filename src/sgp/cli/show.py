"""Command ``sgp show RUN ...``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sgp import paper
from sgp.benchmarks.metrics import acc, bwt, relative_fwt
from sgp.cli.arguments import asks_for_help, parse_into, positional, print_command_help
from sgp.cli.show_games import print_game_comparison, print_game_summary
from sgp.experiments.config import GameConfig, is_whole
from sgp.experiments.display import span
from sgp.experiments.folder import RunError, RunFolder
from sgp.experiments.game_summary import GameSummary, read_game_summary
from sgp.experiments.summary import Summary, read_summary
from sgp.methods import METHODS

# Networks with more layers get a summary of the free shares instead of a list.
MOST_LAYERS = 8


@dataclass(frozen=True)
class Options:
    """Show the accuracy matrix and the metrics of runs; several runs are also compared."""

    runs: tuple[Path, ...] = positional("RUN ...")
    """Folders of runs, finished or not."""


def main(arguments: list[str]) -> int:
    """Print the accuracy matrix and the metrics of runs, and compare several runs."""
    if not arguments or asks_for_help(arguments):
        print_command_help(Options, "sgp show RUN ...")
        return 0
    try:
        options = parse_into(Options, arguments)
    except ValueError as error:
        print(f"sgp show: {error}", file=sys.stderr)
        return 2
    console = Console()
    try:
        found = {str(path): _read(RunFolder(path)) for path in options.runs}
    except (RunError, ValueError) as error:
        print(f"sgp show: {error}", file=sys.stderr)
        return 1
    for name, summary in found.items():
        _print(console, name, summary)
    # Accuracies on different benchmarks cannot be compared.
    if len(found) > 1 and len({summary.config.benchmark for summary in found.values()}) == 1:
        supervised = {name: summary for name, summary in found.items() if isinstance(summary, Summary)}
        games = {name: summary for name, summary in found.items() if isinstance(summary, GameSummary)}
        if supervised:
            _print_comparison(console, supervised)
        if games:
            print_game_comparison(console, games)
    return 0


def print_run(console: Console, name: str, folder: RunFolder) -> None:
    """Print the results of a run.

    Args:
        console: Console to print to.
        name: Name of the run in the heading.
        folder: Folder of the run.
    """
    _print(console, name, _read(folder))


def _read(folder: RunFolder) -> Summary | GameSummary:
    return read_game_summary(folder) if isinstance(folder.read_config(), GameConfig) else read_summary(folder)


def _print(console: Console, name: str, summary: Summary | GameSummary) -> None:
    if isinstance(summary, GameSummary):
        print_game_summary(console, name, summary)
    else:
        print_summary(console, name, summary)


def print_summary(console: Console, name: str, summary: Summary) -> None:
    """Print the accuracy matrix and the metrics of a run, with the paper's metrics in brackets."""
    config, tasks = summary.config, len(summary.names)
    console.print(
        f"[bold]{escape(name)}[/bold]: {config.method} on {config.benchmark}, preset {config.preset}, "
        f"recipe {config.recipe}, seed {config.seed}",
        highlight=False,
        soft_wrap=not console.is_terminal,
    )
    if not tasks:
        console.print("no task has been learned yet\n")
        return
    # Twenty columns fit in 80 characters as whole numbers only.
    digits = 1 if tasks <= 10 else 0
    console.print("accuracy (%) on each task, after each task", style="italic", highlight=False)
    view = Table(box=None, padding=(0, 1, 0, 0))
    view.add_column("after", no_wrap=True, max_width=19 if tasks <= 10 else 14)
    for task in range(tasks):
        view.add_column(str(task + 1), justify="right", no_wrap=True)
    for task, label in enumerate(summary.names):
        row = summary.accuracies[task, : task + 1].tolist()
        view.add_row(f"{task + 1} {escape(label)}", *(f"{value:.{digits}f}" for value in row))
    console.print(view)
    for line in _describe(summary):
        console.print(line, highlight=False, markup=False, soft_wrap=not console.is_terminal)
    console.print()


def _describe(summary: Summary) -> list[str]:
    """Return the metrics of a run in words."""
    config, tasks = summary.config, len(summary.names)
    published = paper.numbers(config.benchmark, config.method) if summary.finished and is_whole(config) else {}
    metrics = f"ACC {acc(summary.accuracies):.2f} %"
    if "acc" in published:
        metrics += f" (paper {published['acc']:.2f}{_format_deviation(published, 'acc_std', '.2f')})"
    # Tasks that are learned jointly are not forgotten one after another.
    if tasks > 1 and not METHODS.facts(config.method).trains_jointly:
        metrics += f", BWT {bwt(summary.accuracies):.2f} %"
        if "bwt" in published:
            metrics += f" (paper {100 * published['bwt'] + 0.0:.1f})"
    whole = sum(summary.seconds.values())
    phases = ", ".join(f"{phase} {100 * seconds / whole:.0f} %" for phase, seconds in summary.seconds.items())
    sizes = ", ".join(f"{use} {count / 2**20:.1f} MiB" for use, count in summary.bytes.items())
    lines = [metrics, f"time {span(whole)}: {phases}", f"memory: {sizes}; network capacity {summary.capacity:.0f} %"]
    if summary.free:
        lines.append(f"free: {_describe_free(summary.free)}")
    if not summary.finished:
        lines.append("not finished: resume it with `sgp run RUN --resume`")
    return lines


def _describe_free(layers: dict[str, float]) -> str:
    """Return the free share of each layer; of many layers, the mean and the least."""
    if len(layers) <= MOST_LAYERS:
        return ", ".join(f"{layer} {100 * free:.0f} %" for layer, free in layers.items())
    fullest = min(layers, key=lambda layer: layers[layer])
    mean = sum(layers.values()) / len(layers)
    return f"{100 * mean:.0f} % on average over {len(layers)} layers, least {fullest} {100 * layers[fullest]:.0f} %"


def _format_deviation(published: dict[str, float], name: str, form: str) -> str:
    return f" ± {published[name]:{form}}" if name in published else ""


def _print_comparison(console: Console, summaries: dict[str, Summary]) -> None:
    """Print a table of several runs over the tasks that all of them have learned."""
    tasks = min(len(summary.names) for summary in summaries.values())
    if tasks == 0:
        return
    first = next(iter(summaries.values())).accuracies[:tasks, :tasks]
    view = Table(
        title=f"after {tasks} tasks; FWT is relative to the first run" if tasks > 1 else "after one task",
        title_justify="left",
    )
    view.add_column("run", overflow="fold")
    for heading in ("ACC (%)", "BWT (%)", "FWT (%)", "time", "extra MiB"):
        view.add_column(heading, justify="right", no_wrap=True)
    for name, summary in summaries.items():
        matrix = summary.accuracies[:tasks, :tasks]
        extra = sum(count for use, count in summary.bytes.items() if use != "network")
        view.add_row(
            escape(Path(name).name),
            f"{acc(matrix):.2f}",
            f"{bwt(matrix):.2f}" if tasks > 1 else "",
            f"{relative_fwt(matrix, first):+.2f}",
            span(sum(summary.seconds.values())),
            f"{extra / 2**20:.1f}",
        )
    console.print(view)
