"""A report in a folder: the page, the figures and the tables, each file written whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sgp import storage
from sgp.report import games, tables
from sgp.report.collect import Collection, LeftOut, collect
from sgp.report.draw import draw
from sgp.report.figures import all_figures
from sgp.report.formats import as_csv, as_latex
from sgp.report.groups import Group, group
from sgp.report.page import render

PAGE = "index.html"
# What tells the folder of a report from others, and which files in it are the report's.
MANIFEST = "report.json"
FORMAT = 1


class ReportError(RuntimeError):
    """A report cannot be made; the message says why and what to do."""


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        page: the file to open.
        groups: experiments in it.
        left_out: folders that are not in it.
        tables: how many.
        figures: how many.
    """

    page: Path
    groups: Sequence[Group]
    left_out: Sequence[LeftOut]
    tables: int
    figures: int


def write_report(paths: Iterable[Path], out: Path, progress: Callable[[int, int], object] | None = None) -> Report:
    """Make a report of the runs in some folders.

    Args:
        paths: folders of runs, or folders with such in them.
        out: folder that the report goes to; a report that is there already is replaced, anything else refused.
        progress: told of each figure that is drawn: how many are done, and of how many.

    Raises:
        ReportError: there is no finished run, or `out` is taken.
    """
    before = _earlier(out)
    found = collect(paths)
    if not found.runs:
        raise ReportError(_nothing(found))
    groups = group(found.runs)
    made = _tables(groups)
    figures = all_figures(groups)
    files: dict[str, bytes] = {}
    svgs: dict[str, bytes] = {}
    for number, figure in enumerate(figures, start=1):
        drawn = draw(figure)
        svgs[figure.name] = drawn.pop("svg")
        files |= {f"figures/{figure.name}.{kind}": content for kind, content in drawn.items()}
        if progress is not None:
            progress(number, len(figures))
    for table in made:
        files[f"tables/{table.name}.csv"] = as_csv(table).encode()
        files[f"tables/{table.name}.tex"] = as_latex(table).encode()
    page = render(groups, made, figures, svgs, found.left_out, out).encode()
    _write(out, files, page, before)
    return Report(out / PAGE, groups, found.left_out, len(made), len(figures))


def _tables(groups: Sequence[Group]) -> list[tables.Table]:
    """Every table for which there are runs."""
    made = []
    for benchmark in dict.fromkeys(each.benchmark for each in groups):
        own = [each for each in groups if each.benchmark == benchmark]
        made.append(games.results(benchmark, own) if own[0].is_game else tables.results(benchmark, own))
    made += [each for each in (tables.times(groups), tables.datasets(groups)) if each is not None]
    return [*made, tables.settings(groups)]


def _nothing(found: Collection) -> str:
    reasons = "".join(f"\n  {each.path}: {each.reason}" for each in found.left_out)
    return f"there is no finished run to report:{reasons}"


def _earlier(out: Path) -> set[str]:
    """Files of the report that is in a folder already; empty if there is none.

    Raises:
        ReportError: something else is there.
    """
    if out.is_dir():
        if not any(out.iterdir()):
            return set()
        try:
            content = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
            return {name for name in content["files"] if _is_ours(name)}
        except (OSError, ValueError, KeyError, TypeError):
            raise ReportError(f"{out} is there already and is no report: choose another folder with --out") from None
    if out.exists():
        raise ReportError(f"{out} is a file: choose a folder with --out")
    return set()


def _is_ours(name: object) -> bool:
    """Whether a file's name in a manifest is one that a report writes, and not one somewhere else."""
    if not isinstance(name, str):
        return False
    path = PurePosixPath(name)
    return len(path.parts) == 2 and path.parts[0] in ("figures", "tables") and ".." not in path.parts


def _write(out: Path, files: dict[str, bytes], page: bytes, before: set[str]) -> None:
    """Write all files, the page last but for what is no longer in the report, which goes after it."""
    try:
        for folder in ("figures", "tables"):
            (out / folder).mkdir(parents=True, exist_ok=True)
        # First, so that the folder is known as a report's however far this comes.
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
