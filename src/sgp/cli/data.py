"""Commands ``sgp data get NAME [DIR]`` and ``sgp data check [DIR]``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sgp.benchmarks import BENCHMARKS
from sgp.cli.arguments import Exit, exit_on, parse_into, positional
from sgp.cli.interrupt import raise_on_interrupt
from sgp.registry import UnknownName, unknown

if TYPE_CHECKING:
    from sgp.benchmarks.datasets.check import Report

VARIABLE = "SGP_DATA"
COLOURS = {"complete": "green", "missing": "dim", "damaged": "red"}
USAGE = """usage: sgp data get NAME [DIR]
       sgp data check [DIR]

get     download a data set and check it
check   check which data sets in a folder are complete, missing or damaged

DIR is the folder with the data sets; by default $SGP_DATA."""


@dataclass(frozen=True)
class GetOptions:
    """Download a data set and check it."""

    name: str = positional("NAME")
    """Name of the data set: cifar100, cifar10, mnist, fashion-mnist, svhn or english."""
    directory: Path | None = positional("DIR", default=None)
    """Folder with the data sets, which is created if it does not exist; by default $SGP_DATA."""

    def __post_init__(self) -> None:
        """Check the name."""
        known = {dataset for name in BENCHMARKS for dataset in BENCHMARKS[name].datasets}
        if self.name not in known:
            raise UnknownName(unknown("data set", self.name, known))


@dataclass(frozen=True)
class CheckOptions:
    """Read every data set in a folder and print whether it is complete."""

    directory: Path | None = positional("DIR", default=None)
    """Folder with the data sets; by default $SGP_DATA."""


def main(arguments: list[str]) -> int:
    """Download or check data sets."""
    action, *rest = arguments or ["--help"]
    if action in ("-h", "--help"):
        print(USAGE)
        return 0
    if action not in ("get", "check"):
        raise Exit(2, unknown("action", action, ("get", "check")))
    if action == "check":
        checked = parse_into(CheckOptions, "sgp data check [DIR]", rest)
    else:
        options = parse_into(GetOptions, "sgp data get NAME [DIR]", rest)
    from sgp.benchmarks.datasets.images import DataError

    raise_on_interrupt()
    with exit_on(DataError, code=1):
        reports = _check(checked.directory) if action == "check" else [_download(options.name, options.directory)]
    _print_reports(reports)
    return 1 if any(report.state == "damaged" for report in reports) else 0


def _download(name: str, directory: Path | None) -> Report:
    from sgp.benchmarks.datasets import download, images

    if directory is None and os.environ.get(VARIABLE):
        directory = Path(os.environ[VARIABLE])
    if directory is not None:
        directory = directory.expanduser()
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise images.DataError(f"cannot create the folder {str(directory)!r}: {error.strerror}") from error
    return download.download(name, images.find_data_folder(directory, name))


def _check(directory: Path | None) -> list[Report]:
    from sgp.benchmarks.datasets import check, images

    if directory is None and not os.environ.get(VARIABLE):
        raise images.MissingData(f"name a folder (sgp data check DIR) or set ${VARIABLE}")
    return check.check_all(images.find_data_folder(directory, "data sets"))


def _print_reports(reports: list[Report]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    for report in reports:
        state = f"[{COLOURS[report.state]}]{report.state:<9}[/]"
        console.print(f"{report.name:<14} {state} {escape(report.detail)}", highlight=False, soft_wrap=True)
