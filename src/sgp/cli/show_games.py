"""Results of runs on games, as `sgp show` prints them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sgp.experiments.display import span
from sgp.experiments.game_summary import GameSummary


def print_game_summary(console: Console, name: str, summary: GameSummary) -> None:
    """Print the score of a run on each game after each game, and its metrics."""
    config = summary.config
    console.print(
        f"[bold]{escape(name)}[/bold]: {config.method} on {config.benchmark}, preset {config.preset}, "
        f"seed {config.seed}",
        highlight=False,
        soft_wrap=not console.is_terminal,
    )
    if not summary.names:
        console.print("no game has been learned yet\n")
        return
    console.print("score on each game, after each game", style="italic", highlight=False)
    view = Table(box=None, padding=(0, 1, 0, 0))
    view.add_column("after", no_wrap=True, max_width=19)
    for game in range(len(summary.names)):
        view.add_column(str(game + 1), justify="right", no_wrap=True)
    for game, label in enumerate(summary.names):
        view.add_row(f"{game + 1} {escape(label)}", *map(_format_score, summary.learned[game].scores))
    console.print(view)
    for line in _describe(summary):
        console.print(line, highlight=False, markup=False, soft_wrap=not console.is_terminal)
    console.print()


def _describe(summary: GameSummary) -> list[str]:
    """Return the metrics of a run in words."""
    whole = sum(summary.seconds.values())
    phases = ", ".join(f"{phase} {100 * seconds / whole:.0f} %" for phase, seconds in summary.seconds.items())
    sizes = ", ".join(f"{use} {count / 2**20:.1f} MiB" for use, count in summary.bytes.items())
    lines = [
        f"accumulated normalized reward {_format_reward(summary.learned[-1].accumulated)} of {len(summary.names)}",
        f"time {span(whole)}: {phases}",
        f"memory: {sizes}",
    ]
    if summary.free:
        lines.append("free: " + ", ".join(f"{layer} {100 * free:.0f} %" for layer, free in summary.free.items()))
    if not summary.finished:
        lines.append("not finished: resume it with `sgp run RUN --resume`")
    return lines


def print_game_comparison(console: Console, summaries: Mapping[str, GameSummary]) -> None:
    """Print a table of several runs after the games that all of them have learned."""
    games = min(len(summary.names) for summary in summaries.values())
    # Rewards on different games cannot be compared.
    if games == 0 or len({tuple(summary.names[:games]) for summary in summaries.values()}) > 1:
        return
    view = Table(title=f"after {games} games" if games > 1 else "after one game", title_justify="left")
    view.add_column("run", overflow="fold")
    for heading in ("reward", "kept", "time", "extra MiB"):
        view.add_column(heading, justify="right", no_wrap=True)
    for name, summary in summaries.items():
        extra = sum(count for use, count in summary.bytes.items() if use != "network")
        view.add_row(
            escape(Path(name).name),
            _format_reward(summary.learned[games - 1].accumulated),
            _format_reward(_sum_earlier(summary, games)) if games > 1 else "",
            span(sum(summary.seconds.values())),
            f"{extra / 2**20:.1f}",
        )
    console.print(view)
    console.print("reward: accumulated normalized reward; kept: its part of all games but the last", highlight=False)


def _sum_earlier(summary: GameSummary, games: int) -> float | None:
    """Return the normalized reward on the games before the last one that was learned."""
    earlier = summary.learned[games - 1].normalised[: games - 1]
    known = [value for value in earlier if value is not None]
    return sum(known) if len(known) == len(earlier) else None


def _format_score(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}"


def _format_reward(value: float | None) -> str:
    return "not known" if value is None else f"{value:.2f}"
