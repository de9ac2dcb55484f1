"""Tables and figures of runs on games: scores, the accumulated normalised reward, and the failure of plain Adam."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import mean, stdev
from typing import Any

from sgp import paper
from sgp.experiments.callbacks import span
from sgp.experiments.record import REPEATS, TECHNICAL
from sgp.report import palette, words
from sgp.report.collect import Run
from sgp.report.groups import Comparison, Group, make_labels
from sgp.report.plots import Figure, Lines, Series
from sgp.report.tables import Cell, Column, Table, make_name_cell

Point = tuple[float, float]
# Value of the setting `optimizer` with which gradients are projected and then given to Adam.
FAILS = "adam-on-projected"


def get_reward(run: Run) -> float | None:
    """Return the accumulated normalised reward after all games; None if the scale of a game is not known.

    An agent that learned and kept all games has about as many points as there are games.
    """
    value = run.tasks[-1]["accumulated"]
    return None if value is None else float(value)


def get_rewards(group: Group) -> list[float]:
    """Return the accumulated reward of each run whose games have a known scale."""
    found = [get_reward(run) for run in group.runs]
    return [value for value in found if value is not None]


def make_results(benchmark: str, groups: Sequence[Group]) -> Table:
    """Return the table of the scores on each game after all games."""
    games = list(dict.fromkeys(name for each in groups for name in each.first.names))
    columns = [Column("Method", numeric=False), Column("Accumulated reward"), *(Column(name) for name in games)]
    columns += [Column("Runs"), Column("Time"), Column("Extra memory")]
    rows = []
    for each in groups:
        link, known = each.anchor, get_rewards(each)
        row = [make_name_cell(each), Cell(words.format_spread(known, 2), mean(known), link) if known else Cell()]
        for game in games:
            then, scores = _find_scores(each, game)
            note = f"from {mean(then):.1f}" if game in each.first.names[:-1] else ""
            row.append(Cell(words.format_spread(scores, 1), mean(scores), link, note) if scores else Cell())
        row += [Cell(each.repeats, len(each.runs), link)]
        row += [Cell(span(each.seconds), each.seconds, link)]
        row += [Cell(words.format_size(each.extra_bytes), each.extra_bytes, link)]
        rows.append(row)
    note = (
        "Scores of each game after all games, and the scores when the game was learned. The accumulated reward is "
        "the sum of normalised scores, (score - random) / (reference - random): 0 for an agent that acts at random, 1 "
        "for one that has learned the game; not clipped."
    )
    quoted = paper.table("quoted", benchmark).get("reward", {})
    if quoted:
        gains = " and ".join(
            f"{100 * (ratio - 1):.0f} % more than {words.name_method(name)}" for name, ratio in quoted.items()
        )
        note += f" The paper says that SGP accumulates {gains}; it gives no other numbers."
    return Table(f"results-{benchmark}", f"{words.name_benchmark(benchmark)}: results", columns, rows, note, benchmark)


def _find_scores(group: Group, game: str) -> tuple[list[float], list[float]]:
    """Return the scores of a game when it was learned and after all games, of each run that has the game."""
    found = [(run.tasks, run.names.index(game)) for run in group.runs if game in run.names]
    then = [tasks[number]["scores"][number] for tasks, number in found]
    return then, [tasks[-1]["scores"][number] for tasks, number in found]


def make_figures(benchmark: str, groups: Sequence[Group]) -> Iterator[Figure]:
    """Yield curves over the whole run.

    Args:
        benchmark: Name of the benchmark.
        groups: Groups that learned the same games for as long.

    Yields:
        The figures.
    """
    usual = [each for each in groups if each.first.settings.get("optimizer") != FAILS]
    yield from _plot_scores(benchmark, Comparison(usual).methods)
    yield from _plot_adam(benchmark, groups)


def _plot_scores(benchmark: str, groups: Sequence[Group]) -> Iterator[Figure]:
    if not groups:
        return
    title, names, games = words.name_benchmark(benchmark), make_labels(groups), groups[0].first.names
    for number, game in enumerate(games):
        series = [_make_series(each, names[each.number], partial(_get_scores, game=number)) for each in groups]
        yield Figure(
            f"{benchmark}-reward-{number + 1}",
            f"Game {number + 1}: {game}",
            Lines([each for each in series if len(each.xs)], "million steps", "score", digits=1),
            f"{title}: mean score on {game}, from when it was first trained to the end of the run.",
            "Scores of each game",
            benchmark,
        )
    whole = [_make_series(each, names[each.number], _get_accumulated) for each in groups if get_rewards(each)]
    if whole:
        yield Figure(
            f"{benchmark}-accumulated",
            "Accumulated normalised reward",
            Lines(whole, "million steps", "sum of normalised scores", digits=2),
            f"{title}: an agent that learns and keeps all games rises by about 1 with each of {len(games)}.",
            "Accumulated reward",
            benchmark,
        )


def _get_scores(run: Run, game: int) -> list[Point]:
    return [(each["step"], each["scores"][game]) for each in run.evaluations if len(each["scores"]) > game]


def _get_accumulated(run: Run) -> list[Point]:
    return [(each["step"], each["accumulated"]) for each in run.evaluations if each["accumulated"] is not None]


def _make_series(each: Group, label: str, points: Callable[[Run], list[Point]], *, line: str = "-") -> Series:
    """Return the mean over the runs, at the steps that all of them have."""
    # Two evaluations are at one step, after a game and before the next: the first is of what was learned.
    found = [dict(reversed(points(run))) for run in each.runs]
    steps = sorted(set.intersection(*(set(one) for one in found)))
    columns = [[one[step] for one in found] for step in steps]
    colour, marker = palette.choose_look(each.method)
    deviations = [stdev(values) for values in columns] if len(found) > 1 else []
    return Series(label, [step / 1e6 for step in steps], [mean(v) for v in columns], colour, marker, deviations, line)


def _drop_optimizer(group: Group) -> dict[str, Any]:
    values = group.first.settings.items()
    return {name: value for name, value in values if name not in ("optimizer", *REPEATS, *TECHNICAL)}


def _plot_adam(benchmark: str, groups: Sequence[Group]) -> Iterator[Figure]:
    """Yield the score with projected gradients given to Adam, beside the score with Adam's step projected."""
    for each in groups:
        if each.first.settings.get("optimizer") != FAILS:
            continue
        right = [other for other in groups if other is not each and _drop_optimizer(other) == _drop_optimizer(each)]
        series = []
        for group, name, line in [(each, "gradient projected, then Adam", ":"), *((g, "Adam-GP", "-") for g in right)]:
            label = f"{words.name_method(group.method)}: {name}"
            series.append(_make_series(group, label, partial(_get_scores, game=0), line=line))
        yield Figure(
            f"{benchmark}-adam-{each.number}",
            f"What Adam does to projected gradients: {words.name_method(each.method)}",
            Lines(series, "million steps", f"score on {each.first.names[0]}", digits=1),
            f"{words.name_benchmark(benchmark)}: score on the first game. Adam scales the step of each "
            "weight by itself, so a step from a projected gradient is no longer projected, and the game is forgotten.",
            "The failure of Adam",
            benchmark,
        )
