"""Write a report into a folder: the page, the figures and the tables, each file whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sgp import storage
from sgp.report import games, tables
from sgp.report.collect import Collection, LeftOut, collect_runs
from sgp.report.draw import draw
from sgp.report.figures import make_figures
from sgp.report.formats import format_csv, format_latex
from sgp.report.groups import Group, group_runs
from sgp.report.page import render

PAGE = "index.html"
# File that marks the folder of a report, with the names of the report's files.
MANIFEST = "report.json"
FORMAT = 1


class ReportError(RuntimeError):
    """A report cannot be made; the message says why and what to do."""


@dataclass(frozen=True)
class Report:
    """A report that was written.

    Attributes:
        page: File to open.
        groups: Experiments in the report.
        left_out: Folders that are not in the report.
        tables: Number of tables.
        figures: Number of figures.
    """

    page: Path
    groups: Sequence[Group]
    left_out: Sequence[LeftOut]
    tables: int
    figures: int


def write_report(paths: Iterable[Path], out: Path, progress: Callable[[int, int], object] | None = None) -> Report:
    """Write a report of the runs in some folders.

    Args:
        paths: Folders of runs, or folders with runs somewhere inside.
        out: Folder for the report. An earlier report in it is replaced; any other content is refused.
        progress: Function that is called after each figure with the number of figures drawn and their total.

    Returns:
        The report.

    Raises:
        ReportError: There is no finished run, or `out` has other content.
    """
    before = _find_earlier_files(out)
    found = collect_runs(paths)
    if not found.runs:
        raise ReportError(_explain_no_runs(found))
    groups = group_runs(found.runs)
    made = _make_tables(groups)
    figures = make_figures(groups)
    files: dict[str, bytes] = {}
    svgs: dict[str, bytes] = {}
    for number, figure in enumerate(figures, start=1):
        drawn = draw(figure)
        svgs[figure.name] = drawn.pop("svg")
        files |= {f"figures/{figure.name}.{kind}": content for kind, content in drawn.items()}
        if progress is not None:
            progress(number, len(figures))
    for table in made:
        files[f"tables/{table.name}.csv"] = format_csv(table).encode()
        files[f"tables/{table.name}.tex"] = format_latex(table).encode()
    page = render(groups, made, figures, svgs, found.left_out, out).encode()
    _write(out, files, page, before)
    return Report(out / PAGE, groups, found.left_out, len(made), len(figures))


def _make_tables(groups: Sequence[Group]) -> list[tables.Table]:
    """Return every table for which there are runs."""
    made: list[tables.Table | None] = []
    for benchmark in dict.fromkeys(each.benchmark for each in groups):
        own = [each for each in groups if each.benchmark == benchmark]
        if own[0].is_game:
            made.append(games.make_results(benchmark, own))
        else:
            made += [tables.make_paper_table(benchmark, own), tables.make_results(benchmark, own)]
    made += [tables.make_times(groups), tables.make_datasets(groups), tables.make_settings(groups)]
    return [each for each in made if each is not None]


def _explain_no_runs(found: Collection) -> str:
    reasons = "".join(f"\n  {each.path}: {each.reason}" for each in found.left_out)
    return f"there is no finished run to report:{reasons}"


def _find_earlier_files(out: Path) -> set[str]:
    """Return the files of a report that is already in a folder; empty if there is none.

    Raises:
        ReportError: The folder has other content.
    """
    if out.is_dir():
        if not any(out.iterdir()):
            return set()
        try:
            content = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
            return {name for name in content["files"] if _is_report_file(name)}
        except (OSError, ValueError, KeyError, TypeError):
            raise ReportError(f"{out} already exists and is not a report: choose another folder with --out") from None
    if out.exists():
        raise ReportError(f"{out} is a file: choose a folder with --out")
    return set()


def _is_report_file(name: object) -> bool:
    """Return whether a name in a manifest is one that a report writes, and not a path to somewhere else."""
    if not isinstance(name, str):
        return False
    path = PurePosixPath(name)
    return len(path.parts) == 2 and path.parts[0] in ("figures", "tables") and ".." not in path.parts


def _write(out: Path, files: dict[str, bytes], page: bytes, before: set[str]) -> None:
    """Write all files and the page, then remove the files that are no longer in the report.

    Raises:
        ReportError: A file cannot be written.
    """
    try:
        for folder in ("figures", "tables"):
            (out / folder).mkdir(parents=True, exist_ok=True)
        # First, so that the folder is marked as a report's if writing stops half way.
        names = sorted(files.keys() | before)
        storage.write_bytes(out / MANIFEST, json.dumps({"format": FORMAT, "files": names}, indent=2).encode())
        for name, content in files.items():
            storage.write_bytes(out / name, content)
        storage.write_bytes(out / PAGE, page)
        for name in before - files.keys():
            (out / name).unlink(missing_ok=True)
        storage.write_bytes(out / MANIFEST, json.dumps({"format": FORMAT, "files": sorted(files)}, indent=2).encode())
    except OSError as error:
        raise ReportError(f"cannot write to {out}: {error.strerror}") from error
