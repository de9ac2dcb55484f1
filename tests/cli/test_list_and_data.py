"""``sgp list`` and ``sgp data``."""

from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="the command needs PyYAML, of the extra 'benchmarks'")
pytest.importorskip("sklearn", reason="the command needs scikit-learn, of the extra 'benchmarks'")

import sgp.benchmarks.datasets.check
import sgp.benchmarks.datasets.download
from sgp.benchmarks import BENCHMARKS
from sgp.benchmarks.datasets.check import Report
from sgp.cli import main
from sgp.methods import METHODS
from sgp.networks import NETWORKS

KINDS = {"benchmarks": BENCHMARKS, "methods": METHODS, "networks": NETWORKS}


@pytest.mark.parametrize("kind", [*KINDS, None])
def test_a_list_has_every_name_with_what_it_is(kind: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", *([kind] if kind else [])]) == 0
    output = capsys.readouterr().out
    assert all(len(line) <= 80 for line in output.splitlines())
    words = " ".join(output.split())
    for heading, registry in KINDS.items():
        shown = kind in (None, heading)
        assert (
            heading in output.splitlines()[0] or f"{heading}" in [line.strip() for line in output.splitlines()]
        ) == shown
        for name in registry:
            if shown:
                assert f"{name} {registry[name].description.split()[0]}" in words
            else:
                assert f"{name} {registry[name].description}" not in words


def test_each_method_says_what_it_needs_of_old_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "methods"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    told = {line.split()[0]: line.rstrip() for line in lines if not line.startswith(" ")}
    assert told.keys() == set(METHODS)
    assert told["multitask"].endswith(" all data at once")
    for name in told.keys() - {"multitask"}:
        assert told[name].endswith(" keeps old data" if METHODS[name].keeps_data else " keeps no data")
    assert told["sgp"].endswith(" keeps no data")


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "method"]) == 2
    assert capsys.readouterr().err == "sgp list: there is no kind 'method': did you mean methods?\n"


REPORTS = {
    "complete": Report("cifar100", "complete", "50000 training and 10000 test images of 100 classes"),
    "missing": Report("mnist", "missing", "there is no [train] file"),
    "damaged": Report("svhn", "damaged", "'a/b' is truncated: download it again"),
}


@pytest.mark.parametrize(
    ("states", "code"),
    [(["complete"], 0), (["complete", "missing"], 0), (["complete", "damaged"], 1), (["damaged"], 1)],
)
def test_check_prints_the_state_of_each_data_set_and_fails_for_a_damaged_one(
    states: list[str],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(
        sgp.benchmarks.datasets.check, "check_all", lambda directory: [REPORTS[state] for state in states]
    )
    assert main(["data", "check", str(tmp_path)]) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[REPORTS[state].name, state] for state in states]
    for line, state in zip(lines, states, strict=True):
        assert line.endswith(REPORTS[state].detail)


def test_an_empty_folder_has_everything_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[1] for line in lines} == {"missing"}
    assert "cifar100" in {line.split()[0] for line in lines}


@pytest.mark.parametrize(
    ("arguments", "code", "clue"),
    [
        (["chekc"], 2, "there is no action 'chekc': did you mean check?"),
        (["check", "nowhere"], 1, "there is no folder 'nowhere'"),
        (["check"], 1, "name a folder (sgp data check DIR) or set $SGP_DATA"),
        (["get", "cifar101"], 2, "there is no data set 'cifar101': did you mean cifar10 or cifar100"),
        (["get", "cifar101", "new"], 2, "there is no data set 'cifar101'"),
        (["get", "cifar100"], 1, "where is cifar100?"),
    ],
    ids=str,
)
def test_a_mistake_is_reported_and_nothing_is_created(
    arguments: list[str], code: int, clue: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["data", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("sgp data: ")
    assert clue in captured.err
    assert list(tmp_path.iterdir()) == []


def test_check_looks_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Path] = []
    monkeypatch.setenv("SGP_DATA", str(tmp_path))
    monkeypatch.setattr(sgp.benchmarks.datasets.check, "check_all", lambda directory: asked.append(directory) or [])
    assert main(["data", "check"]) == 0
    assert asked == [tmp_path]


def test_get_creates_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def download(name: str, directory: Path) -> Report:
        asked.append(directory)
        return REPORTS["complete"]

    monkeypatch.setattr(sgp.benchmarks.datasets.download, "download", download)
    monkeypatch.setenv("SGP_DATA", str(tmp_path / "its"))
    assert main(["data", "get", "cifar100"]) == 0
    assert main(["data", "get", "cifar100", str(tmp_path / "deep" / "own")]) == 0
    assert asked == [tmp_path / "its", tmp_path / "deep" / "own"]
    assert all(each.is_dir() for each in asked)


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["data", "get", "cifar100", "file"]) == 1
    assert capsys.readouterr().err == "sgp data: cannot create the folder 'file': File exists\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]], ids=str)
def test_help_shows_both_actions(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", *arguments]) == 0
    output = capsys.readouterr().out
    assert "sgp data get NAME" in output
    assert "sgp data check" in output
