"""Command ``sgp list [benchmarks | methods | networks]``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sgp.benchmarks import BENCHMARKS
from sgp.cli.arguments import parse_into, positional
from sgp.methods import METHODS, MethodFacts
from sgp.networks import NETWORKS
from sgp.registry import Registry

REGISTRIES: dict[str, Registry[Any]] = {"benchmarks": BENCHMARKS, "methods": METHODS, "networks": NETWORKS}


@dataclass(frozen=True)
class Options:
    """List the names that `sgp run` accepts: ours, and those of other installed packages."""

    kind: Literal["benchmarks", "methods", "networks", "all"] = positional("KIND", default="all")
    """Kind of names: benchmarks, methods, networks or all."""


def main(arguments: list[str]) -> int:
    """Print the registered names with their descriptions."""
    kind = parse_into(Options, "sgp list [KIND]", arguments).kind
    for heading in REGISTRIES if kind == "all" else [kind]:
        view = Table(title=heading, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        view.add_column(no_wrap=True, style="bold")
        view.add_column()
        for row in _describe_all(heading):
            view.add_row(*map(escape, row))
        Console().print(view)
    return 0


def _describe_all(kind: str) -> Iterator[tuple[str, ...]]:
    """Yield the name and the description of each entry; a method also has what it keeps of old data."""
    for name in REGISTRIES[kind]:
        try:
            if kind == "methods":
                facts = METHODS.facts(name)
                yield name, facts.description, _describe_data(facts)
            else:
                yield name, REGISTRIES[kind][name].description
        except ValueError as error:  # in another package, which must not hide the rest
            yield name, str(error)


def _describe_data(facts: type[MethodFacts]) -> str:
    """Return what a method keeps of old data, which not everybody may keep."""
    if facts.trains_jointly:
        return "all data at once"
    return "keeps old data" if facts.keeps_data else "keeps no data"
