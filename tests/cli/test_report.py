"""``sgp report``: the path of the page, the runs left out, and errors in one line."""

from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="the command needs PyYAML, of the extra 'benchmarks'")
pytest.importorskip("sklearn", reason="the command needs scikit-learn, of the extra 'benchmarks'")

from report.run_folders import make_rows, write_run

from sgp.cli import main
from sgp.experiments.config import configure
from sgp.methods import METHODS

OWN = """
from sgp.methods import METHODS
from sgp.methods.finetune import Finetune


class Mine(Finetune):
    name = "mine"


if "mine" not in METHODS:
    METHODS.add("mine", Mine)
"""


def run(name: str, method: str = "gpm", *, end: bool = True) -> Path:
    config = configure("digits", method, tasks=2, threads=1)
    return write_run(Path(name), config, make_rows(2), end=end, is_current=False)


@pytest.fixture
def with_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="of the extra 'report'")
    pytest.importorskip("jinja2", reason="of the extra 'report'")
    # Drawing takes its time, and has tests of its own.
    monkeypatch.setattr("sgp.report.write.draw", lambda _: {"pdf": b"pdf", "png": b"png", "svg": b"<svg></svg>"})


@pytest.mark.usefixtures("with_extra")
def test_the_path_of_the_page_and_the_runs_left_out_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run("runs/one")
    run("runs/half", "sgp", end=False)
    assert main(["report", "runs"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1].startswith("1 run, ")
    assert captured.out.splitlines()[-1].endswith(f": {Path('report/index.html')}")
    assert "half is left out: not finished" in captured.err
    assert Path("report/index.html").is_file()


@pytest.mark.usefixtures("with_extra")
def test_the_report_goes_to_another_folder_but_not_into_one_that_is_no_report(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run("runs/one")
    assert main(["report", "runs/one", "--out", "here"]) == 0
    assert Path("here/index.html").is_file()
    assert main(["report", "runs/one", "--out", "runs"]) == 1
    error = capsys.readouterr().err
    assert error == "sgp report: runs already exists and is not a report: choose another folder with --out\n"


@pytest.mark.usefixtures("with_extra")
def test_without_a_run_there_is_an_error_and_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert main(["report", "empty", "nowhere"]) == 1
    captured = capsys.readouterr()
    assert captured.err == (
        "sgp report: there is no finished run to report:\n"
        "  empty: there is no run in it\n"
        "  nowhere: there is no such folder\n"
    )
    assert not Path("report").exists()


@pytest.mark.usefixtures("with_extra")
def test_a_users_method_is_reported_beside_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(METHODS, "_known", dict(METHODS._known))  # which is as it was after the test
    Path("mine.py").write_text(OWN)
    run("runs/one")
    config = Path("runs/mine/config.yaml")
    run("runs/mine", "finetune")
    config.write_text(config.read_text().replace("method: finetune", "method: mine"))
    assert main(["report", "runs", "--import", "mine.py"]) == 0
    assert "2 runs, " in capsys.readouterr().out
    assert ">mine<" in Path("report/index.html").read_text(encoding="utf-8")


def test_without_the_extra_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgp.report.find_spec", lambda name: None)
    run("runs/one")
    assert main(["report", "runs"]) == 2
    error = capsys.readouterr().err
    assert error == 'sgp report: a report needs matplotlib and Jinja2: pip install "sgp-torch[report]"\n'


def test_the_command_without_arguments_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 0
    assert "sgp report" in capsys.readouterr().out
