"""``sgp list [benchmarks | methods | networks]``"""

from __future__ import annotations

from typing import Literal

import tyro
from rich.console import Console
from rich.table import Table

from sgp.benchmarks import BENCHMARKS
from sgp.methods import METHODS
from sgp.networks import NETWORKS


def main(arguments: list[str]) -> int:
    """Print what there is, ours and what other packages have registered."""

    def list_(kind: tyro.conf.Positional[Literal["all", "benchmarks", "methods", "networks"]] = "all", /) -> str:
        """The names that `sgp run` takes.

        Args:
            kind: of what.
        """
        return kind

    kind = tyro.cli(list_, prog="sgp list", args=arguments)
    described = {
        "benchmarks": {name: BENCHMARKS[name].description for name in BENCHMARKS},
        "methods": {name: METHODS[name].description for name in METHODS},
        "networks": {name: NETWORKS[name].description for name in NETWORKS},
    }
    console = Console()
    for heading, entries in described.items():
        if kind not in ("all", heading):
            continue
        view = Table(title=heading, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        view.add_column(no_wrap=True, style="bold")
        view.add_column()
        for name, description in entries.items():
            view.add_row(name, description)
        console.print(view)
    return 0
