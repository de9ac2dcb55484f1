"""Figures of a report: those of the paper and some more, of each what the runs contain."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Any

from torch import Tensor

from sgp import paper
from sgp.experiments.callbacks import format_duration
from sgp.experiments.record import REPEATS, TECHNICAL
from sgp.report import games, palette, words
from sgp.report.collect import Run
from sgp.report.groups import Comparison, Group, find_comparisons, find_reference, make_labels
from sgp.report.plots import Bar, Bars, Figure, Heat, Lines, Series

# Largest number of tasks whose curves are drawn in one figure.
CURVES = 6
# Largest number of layers with figures of their own; of more layers, those of one kind are averaged.
LAYERS = 12


def make_figures(groups: Sequence[Group]) -> list[Figure]:
    """Make every figure for which there is something to draw.

    Args:
        groups: Groups of all benchmarks.

    Returns:
        The figures, benchmark by benchmark.
    """
    figures: list[Figure] = []
    for benchmark in dict.fromkeys(each.benchmark for each in groups):
        own = [each for each in groups if each.benchmark == benchmark]
        comparisons = find_comparisons(own)
        for number, comparison in enumerate(comparisons, start=1):
            made = _compare(benchmark, comparison)
            figures += made if number == 1 else (_place_after(each, number, comparison) for each in made)
        if not own[0].is_game:
            figures += _plot_alpha(benchmark, own)
        described = [
            each
            for number, comparison in enumerate(comparisons)
            for each in comparison.methods
            if number == 0 or each.follows_paper
        ]
        limits = _find_limits([each for each in described if not each.is_game])
        for each in described:
            figures += _describe_group(each, limits)
    return figures


def _compare(benchmark: str, comparison: Comparison) -> Iterator[Figure]:
    """Yield the figures with all methods of a comparison."""
    compared = comparison.methods
    if compared[0].is_game:
        yield from games.make_figures(benchmark, comparison.groups)
        if len(compared) > 1:
            yield from _plot_costs(benchmark, compared, make_labels(compared))
    else:
        yield from _plot_accuracies(benchmark, compared)


def _place_after(figure: Figure, number: int, comparison: Comparison) -> Figure:
    """Return a figure of a later comparison, with a name and a section of its own."""
    name = f"{figure.benchmark}-{number}{figure.name.removeprefix(figure.benchmark)}"
    return replace(figure, name=name, section=f"{figure.section}: {comparison.title}")


def _plot_accuracies(benchmark: str, groups: Sequence[Group]) -> Iterator[Figure]:
    """Yield the accuracies and the costs of groups side by side."""
    names, several = make_labels(groups), len(groups) > 1
    title, tasks = words.name_benchmark(benchmark), len(groups[0].first.names)
    kinds: list[tuple[str, str, str, Callable[[Tensor], Tensor]]] = [
        ("learned", "when it was learned (R_ii)", "immediately after it was learned", lambda matrix: matrix.diagonal()),
        ("kept", "after all tasks (R_Ti)", "after the last one was learned", lambda matrix: matrix[-1]),
    ]
    for name, heading, time, pick in kinds:
        series = [_make_series(each, names[each.number], pick) for each in groups]
        drawing = Lines(series, "task", "accuracy (%)", ticks=_make_ticks(tasks))
        caption = f"{title}: test accuracy of each task, {time}."
        yield Figure(f"{benchmark}-{name}", f"Each task {heading}", drawing, caption, "Accuracy", benchmark)
    if several and tasks > 1:
        yield _plot_stability(benchmark, groups, names)
    if several:
        yield from _plot_costs(benchmark, groups, names)


def _make_ticks(tasks: int) -> dict[float, str]:
    step = 1 if tasks <= 10 else 5
    return {number: str(number) for number in range(1, tasks + 1) if number == 1 or number % step == 0}


def _make_series(each: Group, label: str, pick: Callable[[Tensor], Tensor]) -> Series:
    rows = [pick(run.accuracies).tolist() for run in each.runs]
    columns = list(zip(*rows, strict=True))
    return Series(
        label,
        range(1, len(columns) + 1),
        [mean(values) for values in columns],
        *palette.choose_look(each.method),
        [stdev(values) for values in columns] if len(rows) > 1 else [],
        notes=each.names if not each.names[0].startswith("task ") else (),
    )


def _plot_stability(benchmark: str, groups: Sequence[Group], names: dict[int, str]) -> Figure:
    series = [
        Series(
            names[each.number],
            [float(each.accuracies.diagonal().mean())],
            [mean(each.bwts)],
            *palette.choose_look(each.method),
            line="",
            notes=[f"ACC {each.acc:.2f} %"],
        )
        for each in groups
        if not each.is_joint
    ]
    return Figure(
        f"{benchmark}-stability",
        "Stability against plasticity",
        Lines(series, "accuracy when learned, mean of R_ii (%)", "backward transfer (points)", digits=2),
        f"{words.name_benchmark(benchmark)}: new tasks are learned better to the right, old ones kept better upwards.",
        "Accuracy",
        benchmark,
    )


@dataclass(frozen=True)
class Cost:
    """Something that a run costs.

    Attributes:
        name: Name in the names of files.
        heading: Heading of the figure.
        unit: Unit of the value.
        meaning: What the value is, in words.
        value: Function that returns the value of a run, or the mean of a group.
        reference: Function that describes the value of GPM's group.
        digits: Digits of ratios to GPM.
    """

    name: str
    heading: str
    unit: str
    meaning: str
    value: Callable[[Group | Run], float]
    reference: Callable[[Group], str]
    digits: int


COSTS = (
    Cost(
        "time",
        "Training time",
        "minutes",
        "wall time of whole runs",
        lambda each: each.seconds / 60,
        lambda gpm: f"took {format_duration(gpm.seconds)}",
        2,
    ),
    Cost(
        "memory",
        "Extra memory",
        "MiB",
        "bytes that are stored beside the network after the last task",
        lambda each: each.extra_bytes / 2**20,
        lambda gpm: f"stores {words.format_size(gpm.extra_bytes)}",
        3,
    ),
)


def _plot_costs(benchmark: str, groups: Sequence[Group], names: dict[int, str]) -> Iterator[Figure]:
    """Yield time and memory, relative to GPM's if GPM was run."""
    reference = find_reference(groups[0], groups)
    if reference is not None and not (reference.seconds > 0 and reference.extra_bytes > 0):
        reference = None
    memory = paper.table("quoted", benchmark).get("memory")
    published: dict[str, dict[str, Any]] = {"time": paper.times(benchmark), "memory": {"sgp": memory}}
    for cost in COSTS:
        scale = cost.value(reference) if reference else 1.0
        bars = []
        for each in groups:
            amounts = [cost.value(run) / scale for run in each.runs]
            colour, _ = palette.choose_look(each.method)
            theirs = published[cost.name].get(each.method) if reference and each.follows_paper else None
            bars.append(Bar(names[each.number], mean(amounts), colour, _compute_deviation(amounts) or 0.0, theirs))
        if not any(bar.value for bar in bars):
            continue
        name, heading = f"{benchmark}-{cost.name}", cost.heading
        caption = f"{words.name_benchmark(benchmark)}: {cost.meaning}."
        if reference:
            drawing = Bars(bars, f"{heading.lower()}, GPM is 1", cost.digits, 1.0)
            heading, caption = f"{heading} relative to GPM", f"{caption} GPM {cost.reference(reference)}."
        else:
            drawing = Bars(bars, f"{heading.lower()} ({cost.unit})", 2)
        yield Figure(name, heading, drawing, caption, "Cost", benchmark)


def _compute_deviation(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None


def _plot_alpha(benchmark: str, groups: Sequence[Group]) -> Iterator[Figure]:
    """Yield ACC over SGP's alpha, of groups that differ in nothing else."""
    studies: dict[tuple[str, ...], list[Group]] = {}
    for each in groups:
        values = each.first.settings
        if each.method == "sgp":  # other methods have another alpha
            others = tuple(f"{k}={v!r}" for k, v in values.items() if k not in ("alpha", *REPEATS, *TECHNICAL))
            studies.setdefault(others, []).append(each)
    found = [study for study in studies.values() if len(study) > 1]
    for number, study in enumerate(found, start=1):
        finite = sorted((each for each in study if 0 < _get_alpha(each) < float("inf")), key=_get_alpha)
        if len(finite) < 2:
            continue
        deviations = [_compute_deviation(each.accs) for each in finite]
        series = Series(
            words.name_method("sgp"),
            [_get_alpha(each) for each in finite],
            [each.acc for each in finite],
            *palette.choose_look("sgp"),
            [each or 0.0 for each in deviations] if any(each is not None for each in deviations) else [],
            notes=[each.repeats for each in finite],
        )
        reference = find_reference(study[0], groups)
        gpm = f"{words.name_method('gpm')} (alpha ∞)"
        best = paper.table("quoted", benchmark).get("best_alpha")
        caption = f"{words.name_benchmark(benchmark)}: average accuracy after all tasks as the scale coefficient grows."
        caption += f" The paper finds the best at {' to '.join(map(str, best))}." if best else ""
        caption += f" Partial runs: {study[0].partial}." if study[0].partial else ""
        drawing = Lines(
            [series],
            "alpha",
            "ACC (%)",
            digits=2,
            ticks={_get_alpha(each): f"{_get_alpha(each):g}" for each in finite},
            log_x=True,
            levels=[(gpm, reference.acc, palette.choose_look("gpm")[0])] if reference else [],
        )
        name = f"{benchmark}-alpha" + (f"-{number}" if len(found) > 1 else "")
        yield Figure(name, "ACC against alpha", drawing, caption, "Accuracy", benchmark)


def _get_alpha(each: Group) -> float:
    return float(each.first.settings["alpha"])


def _find_limits(groups: Sequence[Group]) -> tuple[float, float]:
    """Return the lowest and the highest accuracy of some groups."""
    learned = [row[: task + 1] for each in groups for task, row in enumerate(each.accuracies.tolist())]
    values = [value for row in learned for value in row]
    return (min(values), max(values)) if values else (0.0, 100.0)


def _describe_group(each: Group, limits: tuple[float, float]) -> Iterator[Figure]:
    """Yield the figures of a single group: its accuracy matrix and what its memory stores."""
    slug, title = f"{each.benchmark}-{each.method}-{each.number}", each.title
    tasks = len(each.first.names)
    about = f"{words.name_benchmark(each.benchmark)}, {title}"
    if tasks > 1 and not each.is_joint and not each.is_game:
        heat = Heat([each.accuracies[task, : task + 1].tolist() for task in range(tasks)], each.names, limits)
        caption = f"{about}: accuracy on each task after each task"
        caption += f", mean of {each.repeats}." if len(each.runs) > 1 else "."
        name, heading = f"{slug}-matrix", f"Accuracy matrix: {title}"
        yield Figure(name, heading, heat, caption, "Accuracy matrices", each.benchmark)
    layers = list(each.first.tasks[0].get("free", {}))
    if layers and tasks > 1:
        kinds = _group_layers(layers)
        series = [
            Series(
                words.remove_control_characters(kind),
                range(1, tasks + 1),
                [100 * _compute_free(each, task, own) for task in range(tasks)],
                palette.choose_ramp_colour(number, len(kinds)),
                "osD^v<>"[number % 7],
            )
            for number, (kind, own) in enumerate(kinds.items())
        ]
        lines = Lines(series, "after task", "free (%)", ticks=_make_ticks(tasks))
        caption = f"{about}: the share of each layer that later tasks may still use"
        caption += f"; of {len(layers)} layers the mean of each kind." if len(kinds) < len(layers) else "."
        name, heading = f"{slug}-free", f"Free capacity: {title}"
        yield Figure(name, heading, lines, caption, "Memory of each layer", each.benchmark)
    for key in ("importances", "singular values"):
        yield from _plot_curves(each, slug, about, key)


def _compute_free(each: Group, task: int, layers: Sequence[str]) -> float:
    """Return the mean free share of layers after a task, over the runs."""
    return mean(float(run.tasks[task]["free"].get(layer, 1.0)) for run in each.runs for layer in layers)


def _plot_curves(each: Group, slug: str, about: str, key: str) -> Iterator[Figure]:
    """Yield a figure of each layer, with a curve over its bases after some of the tasks."""
    run, is_importance = each.first, key == "importances"
    layers = [layer for layer, recorded in run.tasks[-1].get("bases", {}).items() if recorded.get(key)]
    drawn = [layers[position] for position in _choose_positions(len(layers), LAYERS)]
    for number, layer in enumerate(drawn, start=1):
        series = []
        for task in _choose_positions(len(run.tasks), CURVES):
            recorded = run.tasks[task].get("bases", {}).get(layer, {}).get(key)
            if recorded:
                positions, values = zip(*recorded, strict=True)
                colour = palette.choose_ramp_colour(task, len(run.tasks))
                series.append(Series(f"after task {task + 1}", positions, values, colour, "o"))
        if is_importance:
            drawing = Lines(series, "basis", "importance of a basis", digits=3)
            text = _describe_importances(each, layer, is_last=layer == layers[-1])
        else:
            drawing = Lines(series, "direction", "singular value, largest is 1", digits=3, log_x=True, log_y=True)
            text = "how strong the inputs of a task are along each direction, old bases included, in descending order."
        shown = words.remove_control_characters(layer)
        caption = f"{about}, layer {shown}: {text}"
        caption += f" Of {_name_run(each)}." if len(each.runs) > 1 else ""
        caption += f" Of {len(layers)} layers {len(drawn)} are drawn." if len(drawn) < len(layers) else ""
        name, heading = f"{slug}-{key.split()[0]}-{number}", key.capitalize()
        yield Figure(name, f"{heading}: {shown}, {each.title}", drawing, caption, heading, each.benchmark)


def _describe_importances(each: Group, layer: str, *, is_last: bool) -> str:
    last = each.first.tasks[-1]["bases"][layer]
    share = last["blocked"] / last["count"] if last["count"] else 0.0
    text = (
        f"importances of the bases in descending order. After the last task {last['blocked']} of {last['count']} bases "
        f"({100 * share:.0f} %) are fully blocked."
    )
    quoted = paper.table("quoted", each.benchmark).get("blocked")
    if quoted and is_last and each.follows_paper and each.method == "sgp":
        text += f" The paper says about {100 * quoted:.0f} % for its last layer."
    return text


def _name_run(each: Group) -> str:
    order = each.first.settings.get("order")
    return f"seed {each.first.config.seed}" + (f", order {order}" if order is not None else "")


def _group_layers(layers: Sequence[str]) -> dict[str, list[str]]:
    """Return layers grouped by name; where there are many, those that differ only in a number together."""
    kinds: dict[str, list[str]] = {}
    for layer in layers:
        kind = re.sub(r"(?<![^.])\d+(?![^.])", "*", layer) if len(layers) > LAYERS else layer
        kinds.setdefault(kind, []).append(layer)
    return kinds


def _choose_positions(amount: int, most: int) -> Iterable[int]:
    """Return at most `most` positions of an amount, with the first and the last."""
    if amount <= most:
        return range(amount)
    return sorted({round(number * (amount - 1) / (most - 1)) for number in range(most)})
