"""``sgp report RUN ...``"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from sgp.cli.run import import_file
from sgp.report import find_missing_packages
from sgp.report.words import format_count


@dataclass(frozen=True)
class Options:
    """The paper's tables and figures for what was run, ours beside the paper's: a page, and files for papers."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, or folders with such in them."""
    out: Path = Path("report")
    """Folder that the report goes to. An earlier report in it is replaced."""
    import_: Annotated[tuple[str, ...], tyro.conf.arg(name="import"), tyro.conf.UseAppendAction] = ()
    """A Python file of yours that registers what the runs are of; may be given several times."""


def main(arguments: list[str]) -> int:
    """Write a report of some runs, and say where it lies."""
    options = tyro.cli(Options, prog="sgp report", args=arguments or ["--help"])
    lacking = find_missing_packages()
    if lacking:
        print(f"sgp report: {lacking}", file=sys.stderr)
        return 2
    from sgp.report.write import ReportError, write_report

    console = Console()
    bar = Progress(TextColumn("figures"), BarColumn(), MofNCompleteColumn(), console=console, transient=True)
    try:
        for script in options.import_:
            import_file(script)
        with bar:
            drawn = bar.add_task("")
            report = write_report(
                options.runs, options.out, lambda done, total: bar.update(drawn, completed=done, total=total)
            )
    except (ReportError, ValueError) as error:
        print(f"sgp report: {error}", file=sys.stderr)
        return 1
    for each in report.left_out:
        print(f"sgp report: {each.path} is left out: {each.reason}", file=sys.stderr)
    runs = format_count(sum(len(each.runs) for each in report.groups), "run")
    tables, figures = format_count(report.tables, "table"), format_count(report.figures, "figure")
    console.print(
        f"{runs}, {tables}, {figures}: {report.page}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return 0
