"""The page: one file with everything in it, which opens from the disk and asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from statistics import mean
from urllib.parse import quote

import sgp
from sgp.experiments.display import span
from sgp.methods import METHODS
from sgp.report import games, palette, words
from sgp.report.collect import LeftOut, Run
from sgp.report.groups import BOUNDS, Group, labels, main_scope, plain_ones, reference_of
from sgp.report.plots import Figure
from sgp.report.tables import Table

# Parts of a section with more figures than this are folded.
MOST_FIGURES = 6


@dataclass(frozen=True)
class Rank:
    """One method in the summary of a benchmark."""

    label: str
    value: str
    width: float
    colour: int
    link: str


@dataclass(frozen=True)
class Card:
    """What a person sees first of a benchmark.

    Attributes:
        title: of the benchmark.
        anchor: of its section.
        value: the best method's number.
        unit: what it is.
        link: to the runs behind it.
        sentence: which method, how well, against which others.
        ranking: all methods, the best first.
        ranking_title: what they are ranked by.
        facts: what it costs.
        warning: what keeps it from being compared with the paper.
    """

    title: str
    anchor: str
    value: str
    unit: str
    link: str
    sentence: str
    ranking: Sequence[Rank]
    ranking_title: str
    facts: Sequence[tuple[str, str]]
    warning: str = ""


@dataclass(frozen=True)
class Part:
    """Figures of one kind."""

    title: str
    figures: Sequence[Figure]

    @property
    def folded(self) -> bool:
        return len(self.figures) > MOST_FIGURES


@dataclass(frozen=True)
class Section:
    """All of one benchmark."""

    title: str
    anchor: str
    tables: Sequence[Table]
    parts: Sequence[Part] = field(default_factory=list)


def render(
    groups: Sequence[Group],
    tables: Sequence[Table],
    figures: Sequence[Figure],
    svgs: Mapping[str, bytes],
    left_out: Sequence[LeftOut],
    out: Path,
) -> str:
    """The page as text. out: where it will lie, which links to the runs start from."""
    from jinja2 import Environment, StrictUndefined
    from jinja2.loaders import FunctionLoader
    from markupsafe import Markup

    room = files("sgp.report").joinpath("templates")
    environment = Environment(
        loader=FunctionLoader(lambda name: room.joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    benchmarks = list(dict.fromkeys(each.benchmark for each in groups))
    script = room.joinpath("page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    runs = sum(len(each.runs) for each in groups)
    return environment.get_template("page.html").render(
        title="Continual learning results",
        subtitle=f"{words.count(runs, 'run')} of {words.count(len({g.method for g in groups}), 'method')} on "
        + ", ".join(map(words.benchmark, benchmarks)),
        version=sgp.__version__,
        colours=palette.EVERY,
        # Nothing but this very script runs in the page.
        digest=f"sha256-{digest}",
        script=Markup(script),
        svgs={name: Markup(svg.decode()) for name, svg in svgs.items()},
        cards=[_card([each for each in groups if each.benchmark == name]) for name in benchmarks],
        sections=[_section(name, tables, figures) for name in benchmarks],
        tables=[table for table in tables if not table.benchmark],
        left_out=[LeftOut(Path(words.clean(str(each.path))), each.reason) for each in left_out],
        groups=[_group(each, out) for each in groups],
    )


def _section(benchmark: str, tables: Sequence[Table], figures: Sequence[Figure]) -> Section:
    own = [figure for figure in figures if figure.benchmark == benchmark]
    parts = [Part(title, list(some)) for title, some in groupby(_together(own), key=lambda figure: figure.section)]
    mine = [table for table in tables if table.benchmark == benchmark]
    return Section(words.benchmark(benchmark), _anchor(benchmark), mine, parts)


def _together(figures: Sequence[Figure]) -> list[Figure]:
    """In the order of the sections' first figures."""
    order = list(dict.fromkeys(figure.section for figure in figures))
    return sorted(figures, key=lambda figure: order.index(figure.section))


def _anchor(benchmark: str) -> str:
    return "benchmark-" + "".join(each if each.isascii() and each.isalnum() else "-" for each in benchmark)


def _card(groups: Sequence[Group]) -> Card:
    """The summary of a benchmark: the best method among those that were run to the same extent."""
    compared = plain_ones(main_scope(groups))
    is_game = groups[0].is_game
    if is_game and not all(map(games.rewards, compared)):
        return _card_without_scale(compared)
    scores = {each.number: mean(games.rewards(each)) if is_game else each.acc for each in compared}
    ranked = sorted(compared, key=lambda each: -scores[each.number])
    names, digits = labels(compared), 2 if is_game else 1
    best = next((each for each in ranked if each.method not in BOUNDS), ranked[0])
    whole = max(len(best.first.names), 1) if is_game else 100.0
    value = words.number(scores[best.number], digits)
    return Card(
        title=words.benchmark(best.benchmark),
        anchor=_anchor(best.benchmark),
        value=value if is_game else f"{value} %",
        unit=f"of {len(best.first.names)} accumulated reward" if is_game else "average accuracy",
        link=best.anchor,
        sentence=_sentence(best, ranked, names, scores, digits),
        ranking=[
            Rank(
                names[each.number],
                words.number(scores[each.number], digits),
                round(max(0.0, min(100.0, 100 * scores[each.number] / whole)), 1),
                palette.EVERY.index(palette.of_method(each.method)[0]),
                each.anchor,
            )
            for each in ranked
        ],
        ranking_title="Accumulated reward of each method" if is_game else "Average accuracy of each method, in percent",
        facts=_facts(best, groups),
        warning=_warning(best),
    )


def _card_without_scale(compared: Sequence[Group]) -> Card:
    """The summary of games whose scores cannot be added up: nobody is ahead."""
    first = compared[0]
    return Card(
        title=words.benchmark(first.benchmark),
        anchor=_anchor(first.benchmark),
        value=words.count(len(first.first.names), "game"),
        unit=f"learned by {words.count(len({each.method for each in compared}), 'method')}",
        link=first.anchor,
        sentence="The accumulated reward is not known, since a game has no scale: its scores are in the table.",
        ranking=[],
        ranking_title="",
        facts=[],
        warning=_warning(first),
    )


def _warning(group: Group) -> str:
    return f"Partial runs: {group.partial}. Not to be compared with the paper." if group.partial else ""


def _sentence(
    best: Group, ranked: Sequence[Group], names: Mapping[int, str], scores: Mapping[int, float], digits: int
) -> str:
    what = words.count(len(best.first.names), "game" if best.is_game else "task")
    others = [each for each in ranked if each is not best and each.method not in BOUNDS]
    if not others:
        return f"{names[best.number]} after {what}, {best.repeats}."
    second = others[0]
    gain = words.signed(scores[best.number] - scores[second.number], digits)
    unit = "" if best.is_game else " points"
    name = names[best.number] + (", which keeps old data," if METHODS[best.method].keeps_data else "")
    return f"{name} is ahead after {what}: {gain}{unit} against {names[second.number]}, the next best."


def _facts(best: Group, groups: Sequence[Group]) -> list[tuple[str, str]]:
    facts = []
    if best.bwts if not best.is_game else []:
        moved = mean(best.bwts)
        facts.append(("Forgets", f"{words.number(max(0.0, -moved), 1)} points"))
    reference = reference_of(best, groups)
    if reference is not None and reference is not best and reference.seconds:
        facts.append(("Time against GPM", f"{best.seconds / reference.seconds:.2f} ×"))
    facts.append(("Time", span(best.seconds)))
    facts.append(("Extra memory", words.size(best.extra_bytes)))
    facts.append(("Rests on", best.repeats))
    published = best.published
    if "acc" in published:
        deviation = f" ± {published['acc_std']:.2f}" if "acc_std" in published else ""
        facts.append(("Paper", f"{published['acc']:.2f}{deviation} %"))
    return facts


def _group(group: Group, out: Path) -> dict[str, object]:
    return {
        "group": group,
        "title": f"{words.benchmark(group.benchmark)}: {group.title}, {group.repeats}",
        "runs": [_run(run, out) for run in group.runs],
    }


def _run(run: Run, out: Path) -> dict[str, str]:
    order = run.settings.get("order")
    facts = [f"seed {run.config.seed}", *([f"order {order}"] if order is not None else [])]
    if not run.is_game:
        facts.append(f"ACC {words.number(run.acc, 2)} %")
        facts += [f"BWT {words.number(run.bwt, 2)} %"] if run.bwt is not None else []
    elif games.reward(run) is not None:
        facts.append(f"accumulated reward {words.number(games.reward(run) or 0.0, 2)}")
    facts.append(span(run.seconds))
    return {
        "name": run.name,
        "path": words.clean(str(run.path)),
        "href": _href(run.path, out),
        "facts": ", ".join(facts),
        "command": run.command,
    }


def _href(path: Path, out: Path) -> str:
    """From the page to a folder, as a relative address; absolute if there is no way between the two."""
    try:
        return quote(Path(os.path.relpath(path.resolve(), out.resolve())).as_posix()) + "/"
    except ValueError:  # Windows: another drive
        return path.resolve().as_uri() + "/"
