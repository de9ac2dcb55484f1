"""Groups of runs that differ only in seed and task order, and comparisons of groups that followed one protocol."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from sgp import paper
from sgp.experiments.config import configure, is_whole
from sgp.experiments.record import REPEATS, TECHNICAL
from sgp.methods import METHODS
from sgp.report import words
from sgp.report.collect import Run
from sgp.report.reproduction import find_differences, find_expected_settings

# Methods that are no continual learning, but bounds to measure it by.
BOUNDS = ("multitask", "stl")
# Settings that say how much a run trains.
AMOUNTS = ("tasks", "epochs", "samples", "steps", "games")
# Settings that two runs must have in common for their times, memories and accuracies to be comparable.
PROTOCOL = ("benchmark", "preset", "recipe", "network", "kind", "pixels", *AMOUNTS)


@dataclass(frozen=True)
class Group:
    """Runs of one experiment.

    Attributes:
        runs: Runs, at least one.
        number: Number of the group in the report, from 1.
    """

    runs: Sequence[Run]
    number: int = 0

    @property
    def first(self) -> Run:
        """First run."""
        return self.runs[0]

    @property
    def benchmark(self) -> str:
        """Name of the benchmark."""
        return self.first.config.benchmark

    @property
    def method(self) -> str:
        """Name of the method."""
        return self.first.config.method

    @property
    def anchor(self) -> str:
        """Anchor of the group's runs on the page."""
        return f"group-{self.number}"

    @cached_property
    def follows_paper(self) -> bool:
        """Whether every setting is that of the paper's table of results for the benchmark."""
        if all(cell.benchmark != self.benchmark for cell in paper.find_cells()):
            return False
        return not find_differences(self.first.settings, find_expected_settings(self.benchmark, self.method))

    @cached_property
    def protocol(self) -> tuple[str, ...]:
        """Protocol of the runs: groups of equal protocols can be compared."""
        # The rows of one table of the paper are compared under different presets.
        if self.follows_paper:
            return self.benchmark, "as in the paper"
        return tuple(repr(self.first.settings.get(name)) for name in PROTOCOL)

    @cached_property
    def changes(self) -> dict[str, Any]:
        """Settings that are not those of benchmark, method, preset and recipe."""
        config = self.first.config
        usual = configure(config.benchmark, config.method, config.preset, config.recipe).flat()
        return {
            name: value
            for name, value in self.first.settings.items()
            if name not in (*REPEATS, *TECHNICAL) and value != usual.get(name)
        }

    @cached_property
    def variant(self) -> str:
        """Difference from other groups of the method that trained as much, in words."""
        config = self.first.config
        parts = [f"preset {config.preset}"] if config.preset != "paper" else []
        parts += [f"recipe {config.recipe}"] if config.recipe != "paper" else []
        named = (*AMOUNTS, *(["pixels"] if self.changes.get("pixels") == "true" else [])) if self.partial else ()
        parts += [f"{name} {words.format_value(value)}" for name, value in self.changes.items() if name not in named]
        return ", ".join(parts)

    @cached_property
    def setting(self) -> str:
        """Difference from other groups of the method and from the paper's runs, in words."""
        return "; ".join(filter(None, (self.variant, f"partial: {self.partial}" if self.partial else "")))

    @property
    def title(self) -> str:
        """Title for a legend or a heading, where it stands alone."""
        return words.name_method(self.method) + (f" ({self.setting})" if self.setting else "")

    @property
    def is_whole(self) -> bool:
        """Whether the runs trained on all that the paper's runs train on."""
        return not self.partial

    @cached_property
    def partial(self) -> str:
        """Difference from the paper's amount of training and data, in words; empty without a difference."""
        config, ours = self.first.config, self.first.settings
        whole = configure(config.benchmark, config.method, config.preset).flat()
        amounts = ("steps",) if self.is_game else ("tasks", "epochs")
        parts = [f"{ours[name]:,} of {whole[name]:,} {name}" for name in amounts if ours.get(name) != whole.get(name)]
        if ours.get("games") != whole.get("games"):
            parts.append(f"games {words.format_value(ours['games'])}")
        parts += [f"{ours['samples']} examples per task"] if ours.get("samples") is not None else []
        if ours.get("pixels", "scrambled") != "scrambled":
            parts.append("true pixels, where the paper's are scrambled")
        return ", ".join(parts) or ("" if is_whole(config) else "not all that the paper's runs train on")

    @cached_property
    def published(self) -> dict[str, float]:
        """Numbers of the paper that the runs can be compared with."""
        return paper.numbers(self.benchmark, self.method) if self.follows_paper else {}

    @property
    def repeats(self) -> str:
        """Number of runs that a mean is over, in words."""
        amount = len(self.runs)
        orders = {run.settings.get("order") for run in self.runs}
        seeds = {run.config.seed for run in self.runs}
        if len(orders) == amount > 1:
            return words.format_count(amount, "order")
        return words.format_count(amount, "seed" if len(seeds) == amount else "run")

    @property
    def accs(self) -> list[float]:
        """ACC of each run, in percent."""
        return [run.acc for run in self.runs]

    @property
    def acc(self) -> float:
        """Mean ACC in percent."""
        return mean(self.accs)

    @property
    def bwts(self) -> list[float]:
        """BWT of each run in points of accuracy; empty where all tasks are learned at once."""
        return [] if self.is_joint else [run.bwt for run in self.runs if run.bwt is not None]

    @property
    def is_game(self) -> bool:
        """Whether the tasks are games."""
        return self.first.is_game

    @property
    def is_joint(self) -> bool:
        """Whether the method learns all tasks at once."""
        return METHODS.facts(self.method).trains_jointly

    @cached_property
    def accuracies(self) -> Tensor:
        """Mean of R over the runs, [T, T]."""
        return torch.stack([run.accuracies for run in self.runs]).mean(0)

    @property
    def seconds(self) -> float:
        """Mean wall time of a run."""
        return mean(run.seconds for run in self.runs)

    @property
    def extra_bytes(self) -> float:
        """Mean number of bytes that are stored beside the network."""
        return mean(run.extra_bytes for run in self.runs)

    @property
    def capacity(self) -> float:
        """Mean number of parameters that inference uses, in percent of one network."""
        return mean(run.capacity for run in self.runs)

    @cached_property
    def names(self) -> list[str]:
        """Names of the tasks. Runs of several task orders have only the positions in common."""
        same = all(run.names == self.first.names for run in self.runs)
        return self.first.names if same else [f"task {number}" for number in range(1, len(self.first.names) + 1)]


@dataclass(frozen=True)
class Comparison:
    """Groups of one benchmark that followed the same protocol.

    Attributes:
        groups: Groups, at least one.
    """

    groups: Sequence[Group]

    @cached_property
    def methods(self) -> list[Group]:
        """Groups without those that only study a setting: of each method the groups with the fewest changes."""
        fewest: dict[str, int] = {}
        for each in self.groups:
            fewest[each.method] = min(fewest.get(each.method, len(each.changes)), len(each.changes))
        return [each for each in self.groups if len(each.changes) == fewest[each.method]]

    @property
    def has_several_methods(self) -> bool:
        """Whether there is something to compare."""
        return len({each.method for each in self.groups}) > 1

    @property
    def follows_paper(self) -> bool:
        """Whether the protocol is the paper's."""
        return self.groups[0].follows_paper

    @property
    def title(self) -> str:
        """Amount of training, in words."""
        first = self.groups[0]
        amount = words.format_count(len(first.first.names), "game" if first.is_game else "task")
        return first.partial or (f"{amount}, as in the paper" if self.follows_paper else amount)


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Group runs by experiment.

    Args:
        runs: Runs of any experiments.

    Returns:
        Groups in the order of benchmarks and methods in their registries, then of settings.
    """
    found: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        values = run.settings.items()
        key = tuple(f"{name}={value!r}" for name, value in values if name not in (*REPEATS, *TECHNICAL))
        found.setdefault(key, []).append(run)
    groups = [Group(sorted(members, key=_get_repeat_key)) for members in found.values()]
    groups.sort(key=_get_sort_key)
    return [Group(each.runs, number) for number, each in enumerate(groups, start=1)]


def _get_repeat_key(run: Run) -> tuple[int, int, str]:
    return run.config.seed, run.settings.get("order") or 0, str(run.path)


def _get_sort_key(group: Group) -> tuple[object, ...]:
    from sgp.benchmarks import BENCHMARKS

    methods, benchmarks = list(METHODS), list(BENCHMARKS)
    alpha = group.first.settings.get("alpha", 0.0)
    return (
        # Benchmarks that are not in the paper's tables come last.
        all(cell.benchmark != group.benchmark for cell in paper.find_cells()),
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


def find_comparisons(groups: Sequence[Group]) -> list[Comparison]:
    """Find the groups of a benchmark that can be compared with each other.

    Args:
        groups: Groups of one benchmark.

    Returns:
        A comparison for each protocol that several methods followed, and for the paper's protocol. If there is neither,
        one comparison of the groups that trained the most. The first comparison is the one to show first: several
        methods before a single one, the paper's protocol before others, then many methods before few.
    """
    by_protocol: dict[tuple[str, ...], list[Group]] = {}
    for each in groups:
        by_protocol.setdefault(each.protocol, []).append(each)
    found = sorted(map(Comparison, by_protocol.values()), key=_rank_comparison, reverse=True)
    return [each for each in found if each.has_several_methods or each.follows_paper] or found[:1]


def _rank_comparison(comparison: Comparison) -> tuple[object, ...]:
    first = comparison.groups[0]
    settings = first.first.settings
    amount = int(settings.get("steps" if first.is_game else "epochs") or 0)
    methods = {each.method for each in comparison.groups}
    is_whole = first.is_whole
    return len(methods) > 1, is_whole, len(methods), len(first.first.names), amount, -first.number


def find_reference(group: Group, groups: Sequence[Group]) -> Group | None:
    """Return GPM's group of the same protocol, by which time, memory and transfer are measured; None without one."""
    same = [each for each in groups if each.method == "gpm" and each.protocol == group.protocol]
    return min(same, key=lambda each: len(each.changes), default=None)


def make_labels(groups: Sequence[Group]) -> dict[int, str]:
    """Return the label of each group by its number: the method, and what is changed where several have one method."""
    methods = [each.method for each in groups]
    return {
        each.number: words.name_method(each.method)
        + (f" ({each.variant})" if each.variant and methods.count(each.method) > 1 else "")
        for each in groups
    }
