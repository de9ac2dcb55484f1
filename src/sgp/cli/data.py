"""``sgp data get NAME [DIR]`` and ``sgp data check [DIR]``"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import tyro
from rich.console import Console
from rich.markup import escape

from sgp.benchmarks.datasets.check import READERS, Report, check
from sgp.benchmarks.datasets.download import get
from sgp.benchmarks.datasets.images import VARIABLE, DataError, MissingData, find
from sgp.registry import UnknownName, unknown

COLOURS = {"complete": "green", "missing": "dim", "damaged": "red"}
USAGE = """usage: sgp data get NAME [DIR]
       sgp data check [DIR]

get     download a data set and check it
check   what is in a folder: complete, missing or damaged

DIR is the folder that data sets lie in; without it $SGP_DATA."""


def main(arguments: list[str]) -> int:
    """Fetch or check data sets."""
    action, *rest = arguments or ["--help"]
    if action in ("-h", "--help"):
        print(USAGE)
        return 0
    if action not in ("get", "check"):
        print(f"sgp data: there is no `sgp data {action}`; there are get and check", file=sys.stderr)
        return 2
    try:
        reports = _get(rest) if action == "get" else _check(rest)
    except UnknownName as error:
        print(f"sgp data: {error}", file=sys.stderr)
        return 2
    except DataError as error:
        print(f"sgp data: {error}", file=sys.stderr)
        return 1
    console = Console()
    for report in reports:
        state = f"[{COLOURS[report.state]}]{report.state:<9}[/]"
        console.print(f"{report.name:<14} {state} {escape(report.detail)}", highlight=False, soft_wrap=True)
    return 1 if any(report.state == "damaged" for report in reports) else 0


def _get(arguments: list[str]) -> list[Report]:
    def get_(name: tyro.conf.Positional[str], directory: tyro.conf.Positional[Path | None] = None, /) -> Report:
        """Download a data set and check it.

        Args:
            name: cifar100, cifar10, mnist, fashion-mnist, svhn or english.
            directory: folder that data sets lie in; without it $SGP_DATA. It is made if it is not there.
        """
        if name not in READERS:
            raise UnknownName(unknown("data set", name, READERS))
        if directory is None and os.environ.get(VARIABLE):
            directory = Path(os.environ[VARIABLE])
        if directory is not None:
            directory = directory.expanduser()
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise DataError(f"cannot make the folder {str(directory)!r}: {error.strerror}") from error
        return get(name, find(directory, name))

    return [tyro.cli(get_, prog="sgp data get", args=arguments)]


def _check(arguments: list[str]) -> list[Report]:
    def check_(directory: tyro.conf.Positional[Path | None] = None, /) -> list[Report]:
        """Read every data set in a folder and say whether it is whole.

        Args:
            directory: folder that data sets lie in; without it $SGP_DATA.
        """
        if directory is None and not os.environ.get(VARIABLE):
            raise MissingData(f"which folder? Say `sgp data check DIR` or set ${VARIABLE}")
        return check(find(directory, "data sets"))

    return tyro.cli(check_, prog="sgp data check", args=arguments)
