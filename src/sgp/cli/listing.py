"""``sgp list [benchmarks | methods | networks]``"""

from __future__ import annotations

from typing import Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sgp.benchmarks import BENCHMARKS
from sgp.methods import METHODS, Method
from sgp.networks import NETWORKS
from sgp.registry import Registry


def main(arguments: list[str]) -> int:
    """Print what there is, ours and what other packages have registered."""

    def list_(kind: tyro.conf.Positional[Literal["all", "benchmarks", "methods", "networks"]] = "all", /) -> str:
        """The names that `sgp run` takes.

        Args:
            kind: of what.
        """
        return kind

    kind = tyro.cli(list_, prog="sgp list", args=arguments)
    registries: dict[str, Registry[Any]] = {"benchmarks": BENCHMARKS, "methods": METHODS, "networks": NETWORKS}
    console = Console()
    for heading, registry in registries.items():
        if kind not in ("all", heading):
            continue
        view = Table(title=heading, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        view.add_column(no_wrap=True, style="bold")
        view.add_column()
        for name in registry:
            try:
                thing = registry[name]
                view.add_row(name, escape(thing.description), *([_data(thing)] if registry is METHODS else []))
            except ValueError as error:  # of another package, which must not hide the rest
                view.add_row(name, escape(str(error)))
        console.print(view)
    return 0


def _data(method: type[Method[Any]]) -> str:
    """What a method needs of old data, which not everybody may keep."""
    if method.trains_jointly:
        return "all data at once"
    return "keeps old data" if method.keeps_data else "keeps no data"
