"""Command ``sgp report RUN ...``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from sgp.cli.arguments import Exit, exit_on, parse_into, positional
from sgp.cli.importing import import_files
from sgp.cli.interrupt import raise_on_interrupt
from sgp.report import find_missing_packages


@dataclass(frozen=True)
class Options:
    """Write the paper's tables and figures for some runs, beside the paper's own numbers: a page, and files for papers.

    The runs of one benchmark are compared with each other.
    """

    runs: tuple[Path, ...] = positional("RUN ...")
    """Folders of runs, or folders that contain such folders."""
    out: Path = Path("report")
    """Folder of the report. An earlier report in it is replaced."""
    import_: tuple[Path, ...] = ()
    """Python file that registers your own method, network or benchmark; can be given several times."""


def main(arguments: list[str]) -> int:
    """Write a report of some runs, and print where it is."""
    options = parse_into(Options, "sgp report RUN ... [OPTIONS]", arguments)
    if lacking := find_missing_packages():
        raise Exit(2, lacking)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from sgp.report.words import format_count
    from sgp.report.write import ReportError, write_report

    raise_on_interrupt()
    console = Console()
    bar = Progress(TextColumn("figures"), BarColumn(), MofNCompleteColumn(), console=console, transient=True)
    with exit_on(ReportError, ValueError, code=1):
        import_files(options.import_)
        with bar:
            task = bar.add_task("")
            report = write_report(
                options.runs, options.out, lambda done, total: bar.update(task, completed=done, total=total)
            )
    for each in report.left_out:
        print(f"sgp report: {each.path} is left out: {each.reason}", file=sys.stderr)
    runs = format_count(sum(len(each.runs) for each in report.groups), "run")
    tables, figures = format_count(report.tables, "table"), format_count(report.figures, "figure")
    console.print(f"{runs}, {tables}, {figures}: {report.page}", highlight=False, markup=False, soft_wrap=True)
    return 0
