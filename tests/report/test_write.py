"""The folder of a report is written and replaced as a whole, and other files are left alone."""

import json
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="configs are YAML files; of the extra 'benchmarks'")
pytest.importorskip("matplotlib", reason="of the extra 'report'")
pytest.importorskip("jinja2", reason="of the extra 'report'")

from report.run_folders import make_rows, write_digits_run, write_games_run, write_run

from sgp.experiments.config import configure
from sgp.report.page import mark_code
from sgp.report.write import Report, ReportError, write_report

BAD = "<script>alert(1)</script>"


def files_in(place: Path) -> set[str]:
    return {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}


class Page(HTMLParser):
    """Tags and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str, attribute: str) -> list[str]:
        return [attrs[attribute] or "" for name, attrs in self.tags if name == tag and attribute in attrs]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Return a complete report beside its runs."""
    place = tmp_path_factory.mktemp("made")
    for method in ("gpm", "sgp"):
        write_digits_run(place / "runs", method, tasks=3)
    return write_report([place / "runs"], place / "out")


@pytest.fixture(scope="module")
def page(made: Report) -> Page:
    return Page(made.page.read_text(encoding="utf-8"))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return runs for a report whose figures are not drawn."""
    monkeypatch.setattr("sgp.report.write.draw", lambda _: {"pdf": b"pdf", "png": b"png", "svg": b"<svg></svg>"})
    for method in ("gpm", "sgp"):
        write_digits_run(tmp_path / "runs", method, tasks=3)
    return tmp_path / "runs"


def test_page_tables_and_figures_are_written(runs: Path, tmp_path: Path) -> None:
    reported: list[tuple[int, int]] = []
    report = write_report([runs], tmp_path / "out", lambda done, total: reported.append((done, total)))
    found = files_in(tmp_path / "out")
    assert report.page == tmp_path / "out" / "index.html"
    assert reported == [(number, report.figures) for number in range(1, report.figures + 1)]
    assert {"index.html", "report.json", "tables/results-digits.csv", "tables/results-digits.tex"} <= found
    assert {"figures/digits-learned.pdf", "figures/digits-learned.png"} <= found
    assert len(found) == 2 + 2 * report.tables + 2 * report.figures


def test_links_have_targets_and_ids_are_unique(made: Report, page: Page) -> None:
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for target in page.all("a", "href"):
        if target.startswith("#"):
            assert target[1:] in ids
        else:
            assert (made.page.parent / target).exists(), target


def test_each_group_lists_its_runs_with_their_commands(made: Report, page: Page) -> None:
    assert "sgp run digits --method sgp --threads 1 --tasks 3" in page.text
    assert str(made.page.parents[1] / "runs" / "sgp-0-tasks3") in page.text


def test_a_page_loads_nothing_from_outside(page: Page) -> None:
    for tag, attrs in page.tags:
        for name in ("src", "href", "xlink:href"):
            value = attrs.get(name) or ""
            assert not value.startswith(("http", "//")), (tag, value)
    (policy,) = [attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_names_are_escaped_everywhere(tmp_path: Path) -> None:
    config = configure("digits", "sgp", tasks=2, threads=1)
    # A path cannot have a slash in a name, so the end tag is of the parent.
    write_run(tmp_path / BAD, config, make_rows(2), is_current=False, names=[BAD, "\" onload='x' {{ 7 * 7 }}\x00"])
    text = write_report([tmp_path], tmp_path / "out").page.read_text(encoding="utf-8")
    page = Page(text)
    assert len([tag for tag, _ in page.tags if tag == "script"]) == 1
    assert "<script>alert" not in text
    assert BAD in page.text
    assert "{{ 7 * 7 }}" in page.text
    assert "\x00" not in text
    assert not any("onload" in attrs for _, attrs in page.tags)


def test_headings_tables_and_figures_are_accessible(page: Page) -> None:
    tags = [tag for tag, _ in page.tags]
    levels = [int(tag[1]) for tag in tags if tag in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert tags.count("h1") == tags.count("main") == tags.count("nav") == tags.count("header") == 1
    assert all(attrs.get("scope") in ("col", "row") for tag, attrs in page.tags if tag == "th")
    plots = [attrs for tag, attrs in page.tags if attrs.get("class") == "plot"]
    assert len(plots) == tags.count("figure") == tags.count("svg")
    assert all(attrs["aria-label"] and attrs["tabindex"] == "0" for attrs in plots)
    assert ("html", {"lang": "en"}) in page.tags


def test_a_page_has_no_literal_backticks(runs: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "half", configure("digits", "ewc", threads=1), make_rows(4), end=False)
    text = write_report([runs, tmp_path / "half"], tmp_path / "out").page.read_text(encoding="utf-8")
    body = text.partition("<body>")[2].partition("<script>")[0]
    assert "`" not in body
    assert f"<code>sgp run {tmp_path / 'half'} --resume</code>" in body


def test_text_between_backticks_is_escaped() -> None:
    assert mark_code("a `<b>` & c") == "a <code>&lt;b&gt;</code> &amp; c"


def test_experiments_that_are_not_compared_are_named(runs: Path, tmp_path: Path) -> None:
    write_digits_run(tmp_path / "runs", "sgp")
    write_digits_run(tmp_path / "runs", "sgp", tasks=3, alpha=25.0)
    text = Page(write_report([runs], tmp_path / "out").page.read_text(encoding="utf-8")).text
    assert "2 experiments are not in the comparisons below" in text
    assert "GPM (partial: 3 of 10 tasks)" in text


def test_unfinished_runs_are_named_on_the_page(runs: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "half", configure("digits", "ewc", threads=1), make_rows(4), end=False)
    report = write_report([runs, tmp_path / "half"], tmp_path / "out")
    assert "not finished: 4 tasks learned so far" in Page(report.page.read_text(encoding="utf-8")).text


def test_runs_on_games_have_a_page(runs: Path, tmp_path: Path) -> None:
    for method in ("sgp", "finetune"):
        write_games_run(tmp_path / "games", method)
    text = Page(write_report([runs, tmp_path / "games"], tmp_path / "out").page.read_text(encoding="utf-8")).text
    assert "Accumulated normalised reward" in text
    assert "MinAtar" in text


def test_an_unknown_reward_is_not_shown_as_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgp.report.write.draw", lambda _: {"pdf": b"pdf", "png": b"png", "svg": b"<svg></svg>"})
    for method in ("sgp", "finetune"):
        write_games_run(tmp_path / "games", method, names=["breakout", "seaquest"])
    text = Page(write_report([tmp_path / "games"], tmp_path / "out").page.read_text(encoding="utf-8")).text
    assert "of 2 accumulated reward" not in text
    assert "is ahead" not in text
    assert "reward is unknown" in text


def test_a_second_report_replaces_the_first_and_leaves_other_files_alone(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_report([runs], out)
    (out / "mine.txt").write_text("mine")
    (out / "figures" / "mine.txt").write_text("mine")
    assert "figures/digits-sgp-2-matrix.pdf" in files_in(out)
    write_report([runs / "gpm-0-tasks3"], out)
    found = files_in(out)
    assert not any("sgp" in name for name in found)
    assert {"mine.txt", "figures/mine.txt", "figures/digits-gpm-1-matrix.pdf"} <= found
    listed = json.loads((out / "report.json").read_text())["files"]
    assert found == {*listed, "index.html", "report.json", "mine.txt", "figures/mine.txt"}


def test_a_manifest_cannot_remove_files_elsewhere(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "figures").mkdir(parents=True)
    (tmp_path / "victim.txt").write_text("here")
    names = ["../victim.txt", "figures/../../victim.txt", str(tmp_path / "victim.txt"), 3, "figures/.."]
    (out / "report.json").write_text(json.dumps({"format": 1, "files": names}))
    write_report([runs / "gpm-0-tasks3"], out)
    assert (tmp_path / "victim.txt").read_text() == "here"


def test_a_folder_with_other_content_is_refused_and_unchanged(runs: Path, tmp_path: Path) -> None:
    before = files_in(runs)
    with pytest.raises(ReportError, match="is not a report: choose another folder"):
        write_report([runs], runs)
    assert files_in(runs) == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(ReportError, match="is a file"):
        write_report([runs], tmp_path / "file")


def test_without_a_finished_run_nothing_is_written(tmp_path: Path) -> None:
    write_run(tmp_path / "half", configure("digits", "gpm", threads=1), make_rows(4), end=False)
    with pytest.raises(ReportError, match=r"no finished run to report:\n.*half: not finished"):
        write_report([tmp_path / "half"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_error_leaves_the_earlier_report_unchanged(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write_report([runs], out)
    before = {name: (out / name).read_bytes() for name in files_in(out)}

    def fail(*_: object) -> str:
        raise RuntimeError("in the middle")

    monkeypatch.setattr("sgp.report.write.render", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        write_report([runs / "gpm-0-tasks3"], out)
    assert {name: (out / name).read_bytes() for name in files_in(out)} == before
