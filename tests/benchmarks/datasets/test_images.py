"""The folder of the data sets is the given one or $SGP_DATA."""

from pathlib import Path

import pytest

from sgp.benchmarks import BENCHMARKS
from sgp.benchmarks.datasets.images import MissingData, find_data_folder


def test_a_given_folder_overrides_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, set_ = tmp_path / "given", tmp_path / "set"
    given.mkdir()
    set_.mkdir()
    monkeypatch.setenv("SGP_DATA", str(set_))
    assert find_data_folder(given, "mnist") == given
    assert find_data_folder(None, "mnist") == set_


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if BENCHMARKS[name].datasets])
def test_without_a_folder_the_error_names_both_ways_to_give_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGP_DATA", raising=False)
    benchmark = BENCHMARKS[name]
    with pytest.raises(
        MissingData, match=rf"--data DIR of a run\) or set \$SGP_DATA; .*sgp data get {benchmark.datasets[0]}"
    ):
        benchmark.stream(benchmark.settings(), None, 0)


def test_a_missing_folder_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"no folder .*absent"):
        find_data_folder(tmp_path / "absent", "mnist")


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if BENCHMARKS[name].datasets])
def test_an_empty_folder_says_what_is_missing(name: str, tmp_path: Path) -> None:
    benchmark = BENCHMARKS[name]
    with pytest.raises(MissingData, match="there is no"):
        benchmark.stream(benchmark.settings(), tmp_path, 0)
