"""`sgp data check`: each data set is complete, missing or damaged, and the sentence names the file."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.written import SMALL_CIFAR, SMALL_MINI, SMALL_MNIST, write_cifar, write_class_folders, write_mnist

from sgp.benchmarks import BENCHMARKS
from sgp.benchmarks.datasets import check, cifar, idx, miniimagenet
from sgp.benchmarks.datasets.images import MissingData

pytest.importorskip("PIL", reason="of the extra 'benchmarks'")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check.READERS, "cifar100", lambda directory: cifar.read(directory, SMALL_CIFAR))
    monkeypatch.setitem(check.READERS, "mnist", lambda directory: idx.read(directory, SMALL_MNIST))
    monkeypatch.setitem(
        check.READERS, "miniimagenet", lambda directory: miniimagenet.decode(directory, replace(SMALL_MINI, names=None))
    )


def test_every_data_set_of_a_benchmark_can_be_checked() -> None:
    assert {dataset for name in BENCHMARKS for dataset in BENCHMARKS[name].datasets} <= set(check.READERS)


def test_an_empty_folder_is_reported_as_missing_everything(tmp_path: Path) -> None:
    reports = check.check_all(tmp_path)
    assert [report.name for report in reports] == list(check.READERS)
    assert {report.state for report in reports} == {"missing"}
    assert all(report.detail for report in reports)
    with pytest.raises(MissingData, match="absent"):
        check.check_all(tmp_path / "absent")


@pytest.mark.usefixtures("small")
def test_reports_distinguish_states_and_name_the_file(tmp_path: Path) -> None:
    write_cifar(tmp_path, SMALL_CIFAR)
    write_mnist(tmp_path / "MNIST" / "raw", SMALL_MNIST)
    write_class_folders(tmp_path / "miniimagenet")
    reports = {report.name: report for report in check.check_all(tmp_path)}
    assert reports["cifar100"] == check.Report("cifar100", "complete", "12 training and 6 test images of 3 classes")
    assert reports["mnist"].state == reports["miniimagenet"].state == "complete"
    assert reports["svhn"].state == "missing"

    (tmp_path / "cifar-100-python" / "test").unlink()
    (tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").write_bytes(b"short")
    (image, *_) = (tmp_path / "miniimagenet" / "n00000002").iterdir()
    image.write_bytes(image.read_bytes()[:60])
    reports = {report.name: report for report in check.check_all(tmp_path)}
    for name, file in (("cifar100", "test"), ("mnist", "t10k-labels-idx1-ubyte"), ("miniimagenet", image.name)):
        assert reports[name].state == "damaged"
        assert file in reports[name].detail
    shutil.rmtree(tmp_path / "miniimagenet")
    assert check.check_one("miniimagenet", tmp_path).state == "missing"


@pytest.mark.slow
def test_the_real_data_sets_are_complete(real_data: Path) -> None:
    states = {name: check.check_one(name, real_data).state for name in ("cifar100", "miniimagenet")}
    if set(states.values()) == {"missing"}:
        pytest.skip("neither CIFAR-100 nor miniImageNet is in $SGP_DATA")
    assert "damaged" not in states.values()
