"""Runs on games: scores over the whole run, the accumulated normalised reward, and what a wrong Adam does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import mean, stdev
from typing import Any

from sgp import paper
from sgp.experiments.display import span
from sgp.experiments.record import REPEATS, TECHNICAL
from sgp.report import palette, words
from sgp.report.collect import Run
from sgp.report.groups import Group, labels, plain_ones
from sgp.report.plots import Figure, Lines, Series
from sgp.report.tables import Cell, Column, Table, name_of

Point = tuple[float, float]
# The optimizer setting that shows how projected gradients fail under Adam.
FAILS = "adam-on-projected"


def reward(run: Run) -> float | None:
    """The accumulated normalised reward after all games: the number of games for an agent that has kept them all."""
    value = run.tasks[-1]["accumulated"]
    return None if value is None else float(value)


def rewards(group: Group) -> list[float]:
    """Of each run; empty if the scale of a game is not known."""
    found = [reward(run) for run in group.runs]
    return [value for value in found if value is not None]


def results(benchmark: str, groups: Sequence[Group]) -> Table:
    """What was kept of each game after all of them."""
    games = list(dict.fromkeys(name for each in groups for name in each.first.names))
    columns = [Column("Method", numeric=False), Column("Accumulated reward"), *(Column(name) for name in games)]
    columns += [Column("Runs"), Column("Time"), Column("Extra memory")]
    rows = []
    for each in groups:
        link, known = each.anchor, rewards(each)
        row = [name_of(each), Cell(words.spread(known, 2), mean(known), link) if known else Cell()]
        for game in games:
            then, scores = _kept(each, game)
            note = f"from {mean(then):.1f}" if game in each.first.names[:-1] else ""
            row.append(Cell(words.spread(scores, 1), mean(scores), link, note) if scores else Cell())
        row += [Cell(each.repeats, len(each.runs), link)]
        row += [Cell(span(each.seconds), each.seconds, link)]
        row += [Cell(words.size(each.extra_bytes), each.extra_bytes, link)]
        rows.append(row)
    note = (
        "Scores of each game after all games, and from what they were when it had been learned. Accumulated reward is "
        "the sum of normalised scores, (score - random) / (reference - random): 0 for an agent that acts at random, 1 "
        "for one that has learned the game; not clipped."
    )
    quoted = paper.table("quoted", benchmark).get("reward", {})
    if quoted:
        told = " and ".join(
            f"{100 * (ratio - 1):.0f} % more than {words.method(name)}" for name, ratio in quoted.items()
        )
        note += f" The paper says that SGP accumulates {told}; it gives no other numbers."
    return Table(f"results-{benchmark}", f"{words.benchmark(benchmark)}: results", columns, rows, note, benchmark)


def _kept(group: Group, game: str) -> tuple[list[float], list[float]]:
    """Scores of a game when it was learned and after all games, of each run that has it."""
    found = [(run.tasks, run.names.index(game)) for run in group.runs if game in run.names]
    then = [tasks[number]["scores"][number] for tasks, number in found]
    return then, [tasks[-1]["scores"][number] for tasks, number in found]


def figures(benchmark: str, groups: Sequence[Group]) -> Iterator[Figure]:
    """Curves over the whole run, of groups that have learned the same games."""
    usual = [each for each in groups if each.first.settings.get("optimizer") != FAILS]
    yield from _curves(benchmark, plain_ones(usual))
    yield from _adam(benchmark, groups)


def _curves(benchmark: str, groups: Sequence[Group]) -> Iterator[Figure]:
    if not groups:
        return
    title, names, games = words.benchmark(benchmark), labels(groups), groups[0].first.names
    for number, game in enumerate(games):
        series = [_series(each, names[each.number], lambda run, number=number: _scores(run, number)) for each in groups]  # type: ignore[misc]
        yield Figure(
            f"{benchmark}-reward-{number + 1}",
            f"Game {number + 1}: {game}",
            Lines([each for each in series if len(each.xs)], "million steps", "score", digits=1),
            f"{title}: mean score on {game}, from when it was first trained to the end of the run.",
            "Scores of each game",
            benchmark,
        )
    whole = [_series(each, names[each.number], _accumulated) for each in groups if rewards(each)]
    if whole:
        yield Figure(
            f"{benchmark}-accumulated",
            "Accumulated normalised reward",
            Lines(whole, "million steps", "sum of normalised scores", digits=2),
            f"{title}: an agent that learns and keeps all games rises by about 1 with each of {len(games)}.",
            "Accumulated reward",
            benchmark,
        )


def _scores(run: Run, game: int) -> list[Point]:
    return [(each["step"], each["scores"][game]) for each in run.evaluations if len(each["scores"]) > game]


def _accumulated(run: Run) -> list[Point]:
    return [(each["step"], each["accumulated"]) for each in run.evaluations if each["accumulated"] is not None]


def _series(each: Group, label: str, points: Callable[[Run], list[Point]], *, line: str = "-") -> Series:
    """The mean over the runs at steps that all of them have."""
    # Two evaluations are at one step, after a game and before the next: the first is of what has been learned.
    found = [dict(reversed(points(run))) for run in each.runs]
    steps = sorted(set.intersection(*(set(one) for one in found)))
    columns = [[one[step] for one in found] for step in steps]
    colour, marker = palette.of_method(each.method)
    deviations = [stdev(values) for values in columns] if len(found) > 1 else []
    return Series(label, [step / 1e6 for step in steps], [mean(v) for v in columns], colour, marker, deviations, line)


def _but_optimizer(group: Group) -> dict[str, Any]:
    values = group.first.settings.items()
    return {name: value for name, value in values if name not in ("optimizer", *REPEATS, *TECHNICAL)}


def _adam(benchmark: str, groups: Sequence[Group]) -> Iterator[Figure]:
    """Projected gradients given to Adam, beside Adam's step projected: the appendix's failure."""
    for each in groups:
        if each.first.settings.get("optimizer") != FAILS:
            continue
        right = [other for other in groups if other is not each and _but_optimizer(other) == _but_optimizer(each)]
        series = []
        for group, name, line in [(each, "gradient projected, then Adam", ":"), *((g, "Adam-GP", "-") for g in right)]:
            one = _series(group, f"{words.method(group.method)}: {name}", lambda run: _scores(run, 0), line=line)
            series.append(one)
        yield Figure(
            f"{benchmark}-adam-{each.number}",
            f"What Adam does to projected gradients: {words.method(each.method)}",
            Lines(series, "million steps", f"score on {each.first.names[0]}", digits=1),
            f"{words.benchmark(benchmark)}: score on the first game. Adam scales each weight's step by itself, so what "
            "comes of a projected gradient leaves the protected space again, and the game is forgotten.",
            "The failure of Adam",
            benchmark,
        )
