"""Command ``sgp show RUN ...``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sgp import paper
from sgp.benchmarks.metrics import acc, bwt, relative_fwt
from sgp.cli.arguments import exit_on, parse_into, positional
from sgp.experiments.callbacks import format_duration
from sgp.experiments.config import is_whole
from sgp.experiments.folder import RunError, RunFolder
from sgp.experiments.summary import Summary, read_summary
from sgp.methods import METHODS

# Networks with more layers get a summary of the free shares instead of a list.
MOST_LAYERS = 8
REWARDS = "reward: accumulated normalized reward; kept: its part of all games but the last"


@dataclass(frozen=True)
class Options:
    """Show the accuracy matrix and the metrics of runs; several runs are also compared."""

    runs: tuple[Path, ...] = positional("RUN ...")
    """Folders of runs, finished or not."""


def main(arguments: list[str]) -> int:
    """Print the accuracy matrix and the metrics of runs, and compare several runs."""
    options, console = parse_into(Options, "sgp show RUN ...", arguments), Console()
    with exit_on(RunError, ValueError, code=1):
        found = {str(path): read_summary(RunFolder(path)) for path in options.runs}
    for name, summary in found.items():
        print_summary(console, name, summary)
    # Results on different benchmarks cannot be compared.
    if len(found) > 1 and len({summary.config.benchmark for summary in found.values()}) == 1:
        _print_comparison(console, found)
    return 0


def print_summary(console: Console, name: str, summary: Summary) -> None:
    """Print the accuracies or scores of a run and its metrics, with the paper's metrics in brackets."""
    config, count = summary.config, len(summary.tasks)
    unit, measure = ("game", "score") if config.is_game else ("task", "accuracy (%)")
    console.print(
        f"[bold]{escape(name)}[/bold]: {config.method} on {config.benchmark}, preset {config.preset}, "
        f"recipe {config.recipe}, seed {config.seed}",
        highlight=False,
        soft_wrap=not console.is_terminal,
    )
    if not count:
        console.print(f"no {unit} has been learned yet\n")
        return
    console.print(f"{measure} on each {unit}, after each {unit}", style="italic", highlight=False)
    view = Table(box=None, padding=(0, 1, 0, 0))
    view.add_column("after", no_wrap=True, max_width=19 if count <= 10 else 14)
    for number in range(1, count + 1):
        view.add_column(str(number), justify="right", no_wrap=True)
    for number, task in enumerate(summary.tasks, start=1):
        row = task["scores" if config.is_game else "accuracies"]
        # Twenty columns fit in 80 characters as whole numbers only.
        cells = (f"{value:.{1 if count <= 10 and abs(value) < 1000 else 0}f}" for value in row)
        view.add_row(f"{number} {escape(task['name'])}", *cells)
    console.print(view)
    for line in _describe(summary):
        console.print(line, highlight=False, markup=False, soft_wrap=not console.is_terminal)
    console.print()


def _describe(summary: Summary) -> list[str]:
    """Return the metrics of a run in words."""
    last, whole = summary.last, sum(summary.seconds.values())
    phases = ", ".join(f"{phase} {100 * seconds / whole:.0f} %" for phase, seconds in summary.seconds.items())
    sizes = ", ".join(f"{use} {count / 2**20:.1f} MiB" for use, count in last["bytes"].items())
    reward = f"accumulated normalized reward {_format_reward(last.get('accumulated'))} of {len(summary.tasks)}"
    lines = [
        reward if summary.config.is_game else _describe_accuracy(summary),
        f"time {format_duration(whole)}: {phases}",
        f"memory: {sizes}; network capacity {last['capacity']:.0f} %",
    ]
    if last["free"]:
        lines.append(f"free: {_describe_free(last['free'])}")
    if not summary.finished:
        lines.append("not finished: resume it with `sgp run RUN --resume`")
    return lines


def _describe_accuracy(summary: Summary) -> str:
    config = summary.config
    published = paper.numbers(config.benchmark, config.method) if summary.finished and is_whole(config) else {}
    metrics = f"ACC {acc(summary.accuracies):.2f} %"
    if "acc" in published:
        deviation = f" ± {published['acc_std']:.2f}" if "acc_std" in published else ""
        metrics += f" (paper {published['acc']:.2f}{deviation})"
    # Tasks that are learned jointly are not forgotten one after another.
    if len(summary.tasks) > 1 and not METHODS.facts(config.method).trains_jointly:
        metrics += f", BWT {bwt(summary.accuracies):.2f} %"
        if "bwt" in published:
            metrics += f" (paper {100 * published['bwt'] + 0.0:.1f})"
    return metrics


def _describe_free(layers: dict[str, float]) -> str:
    """Return the free share of each layer; of many layers, the mean and the least."""
    if len(layers) <= MOST_LAYERS:
        return ", ".join(f"{layer} {100 * free:.0f} %" for layer, free in layers.items())
    fullest = min(layers, key=lambda layer: layers[layer])
    mean = sum(layers.values()) / len(layers)
    return f"{100 * mean:.0f} % on average over {len(layers)} layers, least {fullest} {100 * layers[fullest]:.0f} %"


def _print_comparison(console: Console, summaries: dict[str, Summary]) -> None:
    """Print a table of several runs over the tasks that all of them have learned."""
    first = next(iter(summaries.values()))
    count = min(len(summary.tasks) for summary in summaries.values())
    is_game = first.config.is_game
    # Rewards on different games cannot be compared.
    if count == 0 or (is_game and len({tuple(summary.names[:count]) for summary in summaries.values()}) > 1):
        return
    unit = "game" if is_game else "task"
    view = Table(title=f"after {count} {unit}s" if count > 1 else f"after one {unit}", title_justify="left")
    view.add_column("run", overflow="fold")
    metrics = ("reward", "kept") if is_game else ("ACC (%)", "BWT (%)", "FWT (%)")
    for heading in (*metrics, "time", "extra MiB"):
        view.add_column(heading, justify="right", no_wrap=True)
    for name, summary in summaries.items():
        cells = _compare_rewards(summary, count) if is_game else _compare_accuracies(summary, first, count)
        time, extra = format_duration(sum(summary.seconds.values())), f"{summary.extra_bytes / 2**20:.1f}"
        view.add_row(escape(Path(name).name), *cells, time, extra)
    console.print(view)
    console.print(REWARDS if is_game else "FWT is relative to the first run", highlight=False)


def _compare_accuracies(summary: Summary, first: Summary, count: int) -> list[str]:
    matrix, other = summary.accuracies[:count, :count], first.accuracies[:count, :count]
    backward = f"{bwt(matrix):.2f}" if count > 1 else ""
    return [f"{acc(matrix):.2f}", backward, f"{relative_fwt(matrix, other):+.2f}"]


def _compare_rewards(summary: Summary, count: int) -> list[str]:
    task = summary.tasks[count - 1]
    earlier = task["normalised"][: count - 1]
    kept = None if None in earlier else sum(earlier)
    return [_format_reward(task["accumulated"]), _format_reward(kept) if count > 1 else ""]


def _format_reward(value: float | None) -> str:
    return "not known" if value is None else f"{value:.2f}"
