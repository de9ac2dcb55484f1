"""The paper's figures and some more, for what was run: of each only what the runs contain."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import mean, stdev

from torch import Tensor

from sgp import paper
from sgp.experiments.display import span
from sgp.experiments.record import REPEATS, TECHNICAL
from sgp.report import games, palette, words
from sgp.report.collect import Run
from sgp.report.groups import Group, labels, main_scope, plain_ones, reference_of
from sgp.report.plots import Bar, Bars, Figure, Heat, Lines, Series

# Of the tasks of a run, the curves of so many are drawn.
CURVES = 6
# Of more layers than this those of one kind are taken together, and of so many the curves are drawn.
LAYERS = 12


def all_figures(groups: Sequence[Group]) -> list[Figure]:
    """Every figure for which there is something to draw."""
    figures: list[Figure] = []
    for benchmark in dict.fromkeys(each.benchmark for each in groups):
        own = [each for each in groups if each.benchmark == benchmark]
        compared = plain_ones(main_scope(own))
        if own[0].is_game:
            figures += games.figures(benchmark, main_scope(own))
            figures += _costs(benchmark, compared, labels(compared)) if len(compared) > 1 else []
        else:
            figures += _comparison(benchmark, compared)
            figures += _against_alpha(benchmark, own)
        limits = _limits([each for each in compared if not each.is_game])
        for each in compared:
            figures += _inside(each, limits)
    return figures


def _comparison(benchmark: str, groups: Sequence[Group]) -> Iterator[Figure]:
    """Groups side by side."""
    names, several = labels(groups), len(groups) > 1
    title = words.benchmark(benchmark)
    tasks = len(groups[0].first.names)
    kinds: list[tuple[str, str, Callable[[Tensor], Tensor]]] = [
        ("learned", "Each task when it was learned (R_ii)", lambda matrix: matrix.diagonal()),
        ("kept", "Each task after all tasks (R_Ti)", lambda matrix: matrix[-1]),
    ]
    for name, heading, pick in kinds:
        yield Figure(
            f"{benchmark}-{name}",
            heading,
            Lines(
                [_per_task(each, names[each.number], pick) for each in groups],
                "task",
                "accuracy (%)",
                ticks=_ticks(tasks),
            ),
            f"{title}: test accuracy of each task, "
            + ("immediately after it was learned." if name == "learned" else "after the last one was learned."),
            "Accuracy",
            benchmark,
        )
    if several and tasks > 1:
        yield _scatter(benchmark, groups, names)
    if several:
        yield from _costs(benchmark, groups, names)


def _ticks(tasks: int) -> dict[float, str]:
    step = 1 if tasks <= 10 else 5
    return {number: str(number) for number in range(1, tasks + 1) if number == 1 or number % step == 0}


def _per_task(each: Group, label: str, pick: Callable[[Tensor], Tensor]) -> Series:
    rows = [pick(run.accuracies).tolist() for run in each.runs]
    colour, marker = palette.of_method(each.method)
    several = len(rows) > 1
    return Series(
        label,
        range(1, len(rows[0]) + 1),
        [mean(values) for values in zip(*rows, strict=True)],
        colour,
        marker,
        [stdev(values) for values in zip(*rows, strict=True)] if several else [],
        notes=each.names if not each.names[0].startswith("task ") else (),
    )


def _scatter(benchmark: str, groups: Sequence[Group], names: dict[int, str]) -> Figure:
    series = []
    for each in groups:
        if each.is_joint:
            continue
        colour, marker = palette.of_method(each.method)
        learned = float(each.accuracies.diagonal().mean())
        note = f"ACC {each.acc:.2f} %"
        series.append(Series(names[each.number], [learned], [mean(each.bwts)], colour, marker, line="", notes=[note]))
    return Figure(
        f"{benchmark}-stability",
        "Stability against plasticity",
        Lines(series, "accuracy when learned, mean of R_ii (%)", "backward transfer (points)", digits=2),
        f"{words.benchmark(benchmark)}: to the right, new tasks are learned better; upwards, old ones are kept better.",
        "Accuracy",
        benchmark,
    )


def _costs(benchmark: str, groups: Sequence[Group], names: dict[int, str]) -> Iterator[Figure]:
    """Time and memory, relative to GPM's if it was run."""
    title = words.benchmark(benchmark)
    reference = reference_of(groups[0], groups)
    relative = reference is not None and reference.seconds > 0 and reference.extra_bytes > 0
    kinds: list[tuple[str, str, str, Callable[[Group | Run], float]]] = [
        ("time", "Training time", "minutes", lambda each: each.seconds / 60),
        ("memory", "Extra memory", "MiB", lambda each: each.extra_bytes / 2**20),
    ]
    for name, heading, unit, value in kinds:
        scale = value(reference) if relative and reference is not None else 1.0
        bars = []
        for each in groups:
            amounts = [value(run) / scale for run in each.runs]
            known = paper.times(benchmark).get(each.method) if name == "time" and relative else None
            quoted = (
                paper.table("quoted", benchmark).get("memory") if name == "memory" and each.method == "sgp" else None
            )
            as_paper = not each.partial and not each.changes
            bars.append(
                Bar(
                    names[each.number],
                    mean(amounts),
                    palette.of_method(each.method)[0],
                    stdev(amounts) if len(amounts) > 1 else 0.0,
                    (known or (quoted if relative else None)) if as_paper else None,
                )
            )
        if not any(bar.value for bar in bars):
            continue
        axis = f"{heading.lower()}, GPM is 1" if relative else f"{heading.lower()} ({unit})"
        caption = f"{title}: " + (
            "wall time of whole runs."
            if name == "time"
            else "bytes that are kept beside the network after the last task."
        )
        if reference is not None and relative:
            caption += (
                f" GPM took {span(reference.seconds)}."
                if name == "time"
                else f" GPM keeps {words.size(reference.extra_bytes)}."
            )
        digits = 2 if name == "time" or not relative else 3
        yield Figure(
            f"{benchmark}-{name}",
            heading + (" relative to GPM" if relative else ""),
            Bars(bars, axis, digits, 1.0 if relative else None),
            caption,
            "Cost",
            benchmark,
        )


def _against_alpha(benchmark: str, groups: Sequence[Group]) -> Iterator[Figure]:
    """ACC over SGP's alpha, for groups that differ in nothing else."""
    studies: dict[tuple[str, ...], list[Group]] = {}
    for each in groups:
        values = each.first.settings
        if each.method == "sgp":  # others have an alpha that is something else
            others = tuple(f"{k}={v!r}" for k, v in values.items() if k not in ("alpha", *REPEATS, *TECHNICAL))
            studies.setdefault(others, []).append(each)
    found = [study for study in studies.values() if len(study) > 1]
    for number, study in enumerate(found):
        finite = sorted((each for each in study if 0 < each.first.settings["alpha"] < float("inf")), key=_alpha)
        if len(finite) < 2:
            continue
        colour, marker = palette.of_method(study[0].method)
        series = Series(
            words.method(study[0].method),
            [_alpha(each) for each in finite],
            [each.acc for each in finite],
            colour,
            marker,
            [stdev(each.accs) if len(each.runs) > 1 else 0.0 for each in finite]
            if any(len(g.runs) > 1 for g in finite)
            else [],
            notes=[each.repeats for each in finite],
        )
        reference = reference_of(study[0], groups)
        levels = [(f"{words.method('gpm')} (alpha ∞)", reference.acc, palette.of_method("gpm")[0])] if reference else []
        best = paper.table("quoted", benchmark).get("best_alpha")
        caption = f"{words.benchmark(benchmark)}: average accuracy after all tasks as the scale coefficient grows."
        caption += f" The paper finds the best at {' to '.join(map(str, best))}." if best else ""
        if study[0].partial:
            caption += f" Partial runs: {study[0].partial}."
        yield Figure(
            f"{benchmark}-alpha" + (f"-{number + 1}" if len(found) > 1 else ""),
            "ACC against alpha",
            Lines(
                [series],
                "alpha",
                "ACC (%)",
                digits=2,
                ticks={_alpha(each): f"{_alpha(each):g}" for each in finite},
                log_x=True,
                levels=levels,
            ),
            caption,
            "Accuracy",
            benchmark,
        )


def _alpha(each: Group) -> float:
    return float(each.first.settings["alpha"])


def _limits(groups: Sequence[Group]) -> tuple[float, float]:
    """The lowest and the highest accuracy of some groups."""
    learned = [row[: task + 1] for each in groups for task, row in enumerate(each.accuracies.tolist())]
    values = [value for row in learned for value in row]
    return (min(values), max(values)) if values else (0.0, 100.0)


def _inside(each: Group, limits: tuple[float, float]) -> Iterator[Figure]:
    """One group by itself."""
    slug, title = f"{each.benchmark}-{each.method}-{each.number}", each.title
    tasks = len(each.first.names)
    about = f"{words.benchmark(each.benchmark)}, {title}"
    if tasks > 1 and not each.is_joint and not each.is_game:
        rows = [each.accuracies[task, : task + 1].tolist() for task in range(tasks)]
        yield Figure(
            f"{slug}-matrix",
            f"Accuracy matrix: {title}",
            Heat(rows, each.names, limits),
            f"{about}: accuracy on each task after each task, mean of {each.repeats}."
            if len(each.runs) > 1
            else f"{about}: accuracy on each task after each task.",
            "Accuracy matrices",
            each.benchmark,
        )
    layers = list(each.first.tasks[0].get("free", {}))
    if layers and tasks > 1:
        kinds = _kinds(layers)
        series = [
            Series(
                words.clean(kind),
                range(1, tasks + 1),
                [
                    100 * mean(run.tasks[task]["free"].get(layer, 1.0) for run in each.runs for layer in own)
                    for task in range(tasks)
                ],
                palette.ramp(number, len(kinds)),
                "osD^v<>"[number % 7],
            )
            for number, (kind, own) in enumerate(kinds.items())
        ]
        yield Figure(
            f"{slug}-free",
            f"Free capacity: {title}",
            Lines(series, "after task", "free (%)", ticks=_ticks(tasks)),
            f"{about}: the share of each layer that later tasks may still use"
            + (f"; of {len(layers)} layers the mean of each kind." if len(kinds) < len(layers) else "."),
            "Memory of each layer",
            each.benchmark,
        )
    yield from _curves(each, slug, about, "importances", "Importances", "importance of a basis", log=False)
    yield from _curves(
        each, slug, about, "singular values", "Singular values", "singular value, largest is 1", log=True
    )


def _curves(each: Group, slug: str, about: str, key: str, heading: str, axis: str, *, log: bool) -> Iterator[Figure]:
    """Of each layer, a curve over its bases after some of the tasks."""
    run = each.first
    layers = [layer for layer, told in run.tasks[-1].get("bases", {}).items() if told.get(key)]
    drawn = [layers[position] for position in _some(len(layers), LAYERS)]
    for number, layer in enumerate(drawn, start=1):
        series = []
        for task in _some(len(run.tasks), CURVES):
            told = run.tasks[task].get("bases", {}).get(layer, {}).get(key)
            if told:
                positions, values = zip(*told, strict=True)
                colour = palette.ramp(task, len(run.tasks))
                series.append(Series(f"after task {task + 1}", positions, values, colour, "o"))
        last = run.tasks[-1]["bases"][layer]
        caption = f"{about}, layer {words.clean(layer)}: "
        if key == "importances":
            share = last["blocked"] / last["count"] if last["count"] else 0.0
            caption += (
                f"importances of the bases in falling order. In the end {last['blocked']} of {last['count']} bases "
                f"({100 * share:.0f} %) are fully blocked."
            )
            quoted = paper.table("quoted", each.benchmark).get("blocked")
            if quoted and layer == layers[-1] and not each.partial and not each.changes and each.method == "sgp":
                caption += f" The paper says about {100 * quoted:.0f} % for its last layer."
        else:
            caption += "how strong the inputs of a task are along each direction, old bases included, in falling order."
        caption += f" Of {_which(each)}." if len(each.runs) > 1 else ""
        caption += f" Of {len(layers)} layers {len(drawn)} are drawn." if len(drawn) < len(layers) else ""
        yield Figure(
            f"{slug}-{key.split()[0]}-{number}",
            f"{heading}: {words.clean(layer)}, {each.title}",
            Lines(series, "basis" if not log else "direction", axis, digits=3, log_x=log, log_y=log),
            caption,
            heading,
            each.benchmark,
        )


def _which(each: Group) -> str:
    order = each.first.settings.get("order")
    return f"seed {each.first.config.seed}" + (f", order {order}" if order is not None else "")


def _kinds(layers: Sequence[str]) -> dict[str, list[str]]:
    """Layers by name; where there are many, those that differ in their number alone together."""
    kinds: dict[str, list[str]] = {}
    for layer in layers:
        kind = re.sub(r"(?<![^.])\d+(?![^.])", "*", layer) if len(layers) > LAYERS else layer
        kinds.setdefault(kind, []).append(layer)
    return kinds


def _some(amount: int, most: int) -> Iterable[int]:
    """Positions of some of an amount, with the first and the last."""
    if amount <= most:
        return range(amount)
    return sorted({round(number * (amount - 1) / (most - 1)) for number in range(most)})
