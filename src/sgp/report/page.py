"""The page of a report: one self-contained file, which opens from the disk and makes no network request."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING
from urllib.parse import quote

import sgp
from sgp.experiments.callbacks import format_duration
from sgp.methods import METHODS
from sgp.report import games, palette, words
from sgp.report.collect import LeftOut, Run
from sgp.report.groups import BOUNDS, Group, find_comparisons, find_reference, make_labels
from sgp.report.plots import Figure
from sgp.report.tables import Table

if TYPE_CHECKING:
    from markupsafe import Markup

# Parts of a section with more figures than this are folded.
MOST_FIGURES = 6


# Values that a template shows, by name.
Values = dict[str, object]


def render(
    groups: Sequence[Group],
    tables: Sequence[Table],
    figures: Sequence[Figure],
    svgs: Mapping[str, bytes],
    left_out: Sequence[LeftOut],
    out: Path,
) -> str:
    """Render the page.

    Args:
        groups: Groups of all benchmarks.
        tables: Tables to show.
        figures: Figures to show.
        svgs: Drawing of each figure by its name.
        left_out: Folders that are not in the report.
        out: Folder that the page will be in, which links to the runs start from.

    Returns:
        The page as HTML.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    loader = PackageLoader("sgp.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    benchmarks = {each.benchmark: words.name_benchmark(each.benchmark) for each in groups}
    script, _, _ = loader.get_source(environment, "page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    runs, methods = sum(len(each.runs) for each in groups), len({each.method for each in groups})
    return environment.get_template("page.html").render(
        title="Continual learning results",
        subtitle=f"{words.format_count(runs, 'run')} of {words.format_count(methods, 'method')} on "
        + ", ".join(benchmarks.values()),
        version=sgp.__version__,
        colours=palette.EVERY,
        # The page's security policy allows this script and no other.
        digest=f"sha256-{digest}",
        script=Markup(script),
        svgs={name: Markup(svg.decode()) for name, svg in svgs.items()},
        cards=[_make_card([each for each in groups if each.benchmark == name]) for name in benchmarks],
        sections=[_make_section(name, groups, tables, figures) for name in benchmarks],
        tables=[table for table in tables if not table.benchmark],
        left_out=[(words.remove_control_characters(str(each.path)), mark_code(each.reason)) for each in left_out],
        groups=[
            {
                "group": each,
                "title": f"{benchmarks[each.benchmark]}: {each.title}, {each.repeats}",
                "runs": [_describe_run(run, out) for run in each.runs],
            }
            for each in groups
        ],
    )


def mark_code(text: str) -> Markup:
    """Return a text escaped for HTML, with code elements in place of backticks."""
    from markupsafe import Markup, escape

    parts = (escape(part) for part in text.split("`"))
    code = Markup("<code>{}</code>")
    return Markup().join(code.format(part) if number % 2 else part for number, part in enumerate(parts))


def _make_section(
    benchmark: str, groups: Sequence[Group], tables: Sequence[Table], figures: Sequence[Figure]
) -> Values:
    """Return the section of a benchmark: its tables, its figures by kind, and the groups that are in no comparison."""
    by_section: dict[str, list[Figure]] = {}
    for figure in figures:
        if figure.benchmark == benchmark:
            by_section.setdefault(figure.section, []).append(figure)
    own = [each for each in groups if each.benchmark == benchmark]
    compared = {each.number for comparison in find_comparisons(own) for each in comparison.methods}
    return {
        "title": words.name_benchmark(benchmark),
        "anchor": _make_anchor(benchmark),
        "tables": [table for table in tables if table.benchmark == benchmark],
        "parts": [
            {"title": title, "figures": some, "folded": len(some) > MOST_FIGURES} for title, some in by_section.items()
        ],
        "not_compared": [each for each in own if each.number not in compared],
    }


def _make_anchor(benchmark: str) -> str:
    return "benchmark-" + "".join(each if each.isascii() and each.isalnum() else "-" for each in benchmark)


def _make_card(groups: Sequence[Group]) -> Values:
    """Return the summary of a benchmark: the best method among those that followed the same protocol."""
    compared = find_comparisons(groups)[0].methods
    if groups[0].is_game and not all(map(games.get_rewards, compared)):
        best, values = compared[0], _summarize_without_scale(compared)
    else:
        best, values = _rank_methods(compared, groups)
    return values | {
        "title": words.name_benchmark(best.benchmark),
        "anchor": _make_anchor(best.benchmark),
        "link": best.anchor,
        "warning": f"Partial runs: {best.partial}. They cannot be compared with the paper." if best.partial else "",
    }


def _rank_methods(compared: Sequence[Group], groups: Sequence[Group]) -> tuple[Group, Values]:
    """Return the best method, and the values of a summary that ranks all."""
    is_game = groups[0].is_game
    scores = {each.number: mean(games.get_rewards(each)) if is_game else each.acc for each in compared}
    ranked = sorted(compared, key=lambda each: -scores[each.number])
    names, digits = make_labels(compared), 2 if is_game else 1
    best = next((each for each in ranked if each.method not in BOUNDS), ranked[0])
    whole = max(len(best.first.names), 1) if is_game else 100.0
    value = words.format_number(scores[best.number], digits)
    return best, {
        "value": value if is_game else f"{value} %",
        "unit": f"of {len(best.first.names)} accumulated reward" if is_game else "average accuracy",
        "sentence": _make_sentence(best, ranked, names, scores, digits),
        "ranking": [
            {
                "label": names[each.number],
                "value": words.format_number(scores[each.number], digits),
                "width": round(max(0.0, min(100.0, 100 * scores[each.number] / whole)), 1),
                "colour": palette.EVERY.index(palette.choose_look(each.method)[0]),
                "link": each.anchor,
            }
            for each in ranked
        ],
        "ranking_title": "Accumulated reward of each method"
        if is_game
        else "Average accuracy of each method, in percent",
        "facts": _list_facts(best, groups),
    }


def _summarize_without_scale(compared: Sequence[Group]) -> Values:
    """Return the values of a summary of games whose scores cannot be added up, so that no method is ahead."""
    return {
        "value": words.format_count(len(compared[0].first.names), "game"),
        "unit": f"learned by {words.format_count(len({each.method for each in compared}), 'method')}",
        "sentence": "The accumulated reward is unknown, because a game has no scale; the scores are in the table.",
        "ranking": [],
    }


def _make_sentence(
    best: Group, ranked: Sequence[Group], names: Mapping[int, str], scores: Mapping[int, float], digits: int
) -> str:
    what = words.format_count(len(best.first.names), "game" if best.is_game else "task")
    others = [each for each in ranked if each is not best and each.method not in BOUNDS]
    if not others:
        return f"{names[best.number]} after {what}, {best.repeats}."
    second = others[0]
    gain = words.format_signed(scores[best.number] - scores[second.number], digits)
    unit = "" if best.is_game else " points"
    name = names[best.number] + (", which stores old data," if METHODS.facts(best.method).keeps_data else "")
    return f"{name} is ahead after {what}: {gain}{unit} against {names[second.number]}, the next best."


def _list_facts(best: Group, groups: Sequence[Group]) -> list[tuple[str, str]]:
    facts = []
    if not best.is_game and best.bwts:
        facts.append(("Forgets", f"{words.format_number(max(0.0, -mean(best.bwts)), 1)} points"))
    reference = find_reference(best, groups)
    if reference is not None and reference is not best and reference.seconds:
        facts.append(("Time against GPM", f"{best.seconds / reference.seconds:.2f} ×"))
    size = words.format_size(best.extra_bytes)
    facts += [("Time", format_duration(best.seconds)), ("Extra memory", size), ("Rests on", best.repeats)]
    if "acc" in best.published:
        published = words.format_deviation(best.published["acc"], best.published.get("acc_std"), 2)
        facts.append(("Paper", f"{published} %"))
    return facts


def _describe_run(run: Run, out: Path) -> dict[str, str]:
    order = run.settings.get("order")
    facts = [f"seed {run.config.seed}", *([f"order {order}"] if order is not None else [])]
    if not run.is_game:
        facts.append(f"ACC {words.format_number(run.acc, 2)} %")
        facts += [f"BWT {words.format_number(run.bwt, 2)} %"] if run.bwt is not None else []
    elif games.get_reward(run) is not None:
        facts.append(f"accumulated reward {words.format_number(games.get_reward(run) or 0.0, 2)}")
    facts.append(format_duration(run.seconds))
    return {
        "name": run.name,
        "path": words.remove_control_characters(str(run.path)),
        "href": _make_address(run.path, out),
        "facts": ", ".join(facts),
        "command": run.command,
    }


def _make_address(path: Path, out: Path) -> str:
    """Return the address of a folder relative to the page; absolute if there is no relative path."""
    try:
        return quote(Path(os.path.relpath(path.resolve(), out.resolve())).as_posix()) + "/"
    except ValueError:  # Windows: another drive
        return path.resolve().as_uri() + "/"
