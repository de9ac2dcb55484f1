"""Runs that differ in nothing but seed and task order, whose numbers may be averaged; and what they come to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from sgp import paper
from sgp.benchmarks.metrics import relative_fwt
from sgp.experiments.config import configure, is_whole
from sgp.experiments.record import REPEATS, TECHNICAL
from sgp.methods import METHODS
from sgp.report import words
from sgp.report.collect import Run

# Methods that are no continual learning but what it is measured against.
BOUNDS = ("multitask", "stl")
# What two runs must have in common for their times, memories and accuracies to say something of each other.
SCOPE = ("benchmark", "preset", "recipe", "network", "tasks", "epochs", "samples", "kind", "pixels", "games", "steps")
# How much was learned.
AMOUNTS = ("tasks", "epochs", "samples", "steps", "games")


@dataclass(frozen=True)
class Group:
    """Runs of one experiment.

    Attributes:
        runs: at least one.
        number: of the group in the report, from 1.
    """

    runs: Sequence[Run]
    number: int = 0

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def benchmark(self) -> str:
        return self.first.config.benchmark

    @property
    def method(self) -> str:
        return self.first.config.method

    @property
    def anchor(self) -> str:
        """Where the page tells of its runs."""
        return f"group-{self.number}"

    @cached_property
    def scope(self) -> tuple[str, ...]:
        return tuple(repr(self.first.settings.get(name)) for name in SCOPE)

    @cached_property
    def changes(self) -> dict[str, Any]:
        """Settings that are not those of benchmark, method, preset and recipe."""
        config = self.first.config
        usual = configure(config.benchmark, config.method, config.preset, config.recipe).flat()
        ours = self.first.settings
        return {
            name: value
            for name, value in ours.items()
            if name not in (*REPEATS, *TECHNICAL) and value != usual.get(name)
        }

    @cached_property
    def variant(self) -> str:
        """What tells the group from others of its method that learned as much."""
        config = self.first.config
        parts = [f"preset {config.preset}"] if config.preset != "paper" else []
        parts += [f"recipe {config.recipe}"] if config.recipe != "paper" else []
        told = (*AMOUNTS, *(["pixels"] if self.changes.get("pixels") == "true" else [])) if self.partial else ()
        parts += [f"{name} {words.plain(value)}" for name, value in self.changes.items() if name not in told]
        return ", ".join(parts)

    @cached_property
    def setting(self) -> str:
        """What tells the group from others of its method, and from the paper's runs."""
        return "; ".join(filter(None, (self.variant, f"partial: {self.partial}" if self.partial else "")))

    @property
    def title(self) -> str:
        """For a legend or a heading, where it stands alone."""
        return words.method(self.method) + (f" ({self.setting})" if self.setting else "")

    @property
    def is_whole(self) -> bool:
        """Whether all of the benchmark was learned, and as the paper did."""
        return not self.partial

    @cached_property
    def partial(self) -> str:
        """What is missing for it to stand beside the paper, in words; empty if nothing is."""
        config, ours = self.first.config, self.first.settings
        whole = configure(config.benchmark, config.method, config.preset).flat()
        amounts = ("steps",) if self.is_game else ("tasks", "epochs")
        parts = [f"{ours[name]:,} of {whole[name]:,} {name}" for name in amounts if ours.get(name) != whole.get(name)]
        if ours.get("games") != whole.get("games"):
            parts.append(f"games {words.plain(ours['games'])}")
        parts += [f"{ours['samples']} examples a task"] if ours.get("samples") is not None else []
        if ours.get("pixels", "scrambled") != "scrambled":
            parts.append("true pixels, where the paper's are scrambled")
        return ", ".join(parts) or ("" if is_whole(config) else "not all that the paper's runs learn")

    @cached_property
    def published(self) -> dict[str, float]:
        """The paper's numbers, if these runs are what they are of."""
        return paper.numbers(self.benchmark, self.method) if self.is_whole and not self.changes else {}

    @property
    def repeats(self) -> str:
        """How many runs a mean rests on."""
        amount = len(self.runs)
        orders = {run.settings.get("order") for run in self.runs}
        seeds = {run.config.seed for run in self.runs}
        if len(orders) == amount > 1:
            return words.count(amount, "order")
        return words.count(amount, "seed" if len(seeds) == amount else "run")

    @property
    def accs(self) -> list[float]:
        return [run.acc for run in self.runs]

    @property
    def acc(self) -> float:
        return mean(self.accs)

    @property
    def bwts(self) -> list[float]:
        """In points of accuracy; none where all tasks are learned at once."""
        return [] if self.is_joint else [run.bwt for run in self.runs if run.bwt is not None]

    @property
    def is_game(self) -> bool:
        return self.first.is_game

    @property
    def is_joint(self) -> bool:
        return METHODS[self.method].trains_jointly

    @cached_property
    def accuracies(self) -> Tensor:
        """The mean of R over the runs. [T, T]"""
        return torch.stack([run.accuracies for run in self.runs]).mean(0)

    @property
    def seconds(self) -> float:
        return mean(run.seconds for run in self.runs)

    @property
    def extra_bytes(self) -> float:
        return mean(run.extra_bytes for run in self.runs)

    @property
    def capacity(self) -> float:
        return mean(run.capacity for run in self.runs)

    @cached_property
    def names(self) -> list[str]:
        """Of the tasks; of several task orders only the positions are the same."""
        same = all(run.names == self.first.names for run in self.runs)
        return self.first.names if same else [f"task {number}" for number in range(1, len(self.first.names) + 1)]


def group(runs: Iterable[Run]) -> list[Group]:
    """Runs by experiment: in the order of benchmarks and methods in their registries, then of settings."""
    found: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        values = run.settings.items()
        key = tuple(f"{name}={value!r}" for name, value in values if name not in (*REPEATS, *TECHNICAL))
        found.setdefault(key, []).append(run)
    groups = [Group(sorted(members, key=_repeat)) for members in found.values()]
    groups.sort(key=_rank)
    return [Group(each.runs, number) for number, each in enumerate(groups, start=1)]


def _repeat(run: Run) -> tuple[int, int, str]:
    return run.config.seed, run.settings.get("order") or 0, str(run.path)


def _rank(group: Group) -> tuple[object, ...]:
    from sgp.benchmarks import BENCHMARKS

    methods, benchmarks = list(METHODS), list(BENCHMARKS)
    alpha = group.first.settings.get("alpha", 0.0)
    return (
        # What is not of the paper comes last.
        not any(group.benchmark == of and paper.numbers(of, method) for of, method in paper.rows()),
        benchmarks.index(group.benchmark),
        not group.is_whole,
        -len(group.first.names),
        group.first.config.preset,
        group.first.config.recipe,
        methods.index(group.method),
        len(group.changes),
        alpha if isinstance(alpha, float) else 0.0,
        group.setting,
    )


def reference_of(group: Group, groups: Sequence[Group]) -> Group | None:
    """GPM's group that another's time, memory and transfer are measured by: with the same tasks and epochs."""
    same = [each for each in groups if each.method == "gpm" and each.scope == group.scope]
    return min(same, key=lambda each: len(each.changes), default=None)


def relative_transfer(group: Group, reference: Group) -> float:
    """Forward transfer relative to another group's, in points of accuracy."""
    return relative_fwt(group.accuracies, reference.accuracies)


def labels(groups: Sequence[Group]) -> dict[int, str]:
    """What groups of one scope are called in a legend: by method, and where that is not enough by what is changed."""
    methods = [each.method for each in groups]
    return {
        each.number: words.method(each.method)
        + (f" ({each.variant})" if each.variant and methods.count(each.method) > 1 else "")
        for each in groups
    }


def main_scope(groups: Sequence[Group]) -> list[Group]:
    """Of the groups of a benchmark those that are compared: the most tasks, then methods, that learned the same."""

    def amount(group: Group) -> tuple[object, ...]:
        methods = {each.method for each in groups if each.scope == group.scope}
        return group.is_whole, len(group.first.names), len(methods), _epochs(group), -group.number

    best = max(groups, key=amount)
    return [each for each in groups if each.scope == best.scope]


def _epochs(group: Group) -> int:
    values = group.first.settings
    return int(values.get("steps" if group.is_game else "epochs") or 0)


def plain_ones(groups: Sequence[Group]) -> list[Group]:
    """Without those that only study a setting: of each method those with the fewest changes."""
    fewest: dict[tuple[str, ...], int] = {}
    for each in groups:
        key = (each.method, *each.scope)
        fewest[key] = min(fewest.get(key, len(each.changes)), len(each.changes))
    return [each for each in groups if len(each.changes) == fewest[each.method, *each.scope]]
