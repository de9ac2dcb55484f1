"""Results of a run, read from its folder at any moment."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("yaml", reason="configs are YAML files; of the extra 'benchmarks'")

from sgp.experiments.config import configure
from sgp.experiments.folder import RunError, RunFolder
from sgp.experiments.summary import build_accuracy_matrix, read_summary, sum_seconds, write_tables

CONFIG = configure("digits", "gpm")


def test_rows_become_a_matrix_that_is_zero_above_the_diagonal() -> None:
    matrix = build_accuracy_matrix([[90.0], [80.0, 70.0]])
    assert torch.equal(matrix, torch.tensor([[90.0, 0.0], [80.0, 70.0]], dtype=torch.float64))
    assert build_accuracy_matrix([]).shape == (0, 0)


def test_a_row_of_more_tasks_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="after task 2 there are 3 accuracies"):
        build_accuracy_matrix([[90.0], [80.0, 70.0, 60.0]])


def test_seconds_are_summed_by_phase() -> None:
    found = sum_seconds([{"seconds": {"a": 1.0, "b": 2.0}}, {"x": 1}, {"seconds": {"a": 0.5}}])
    assert found == {"a": 1.5, "b": 2.0}


def test_a_folder_tells_what_it_has_come_to_while_it_grows(tmp_path: Path) -> None:
    with RunFolder.begin(tmp_path, CONFIG, resume=False) as folder:
        empty = read_summary(folder)
        assert (empty.names, empty.finished, empty.seconds, empty.extra_bytes) == ([], False, {}, 0)
        folder.log("epoch", task=0, seconds={"train": 2.0})
        task = {"free": {"hidden.0": 0.5}, "capacity": 100.0, "bytes": {"network": 8, "bases": 4}}
        folder.log("task", task=0, name="first, of two", accuracies=[90.0], seconds={"test": 1.0}, **task)
        half = read_summary(RunFolder(tmp_path))
        assert (half.names, half.finished, half.seconds) == (["first, of two"], False, {"train": 2.0, "test": 1.0})
        assert (half.extra_bytes, half.last["free"]) == (4, {"hidden.0": 0.5})
        folder.log("task", task=1, name="second", accuracies=[80.0, 70.0], seconds={"test": 1.5}, **task)
        folder.log("end", acc=75.0)
        write_tables(folder)
    whole = read_summary(RunFolder(tmp_path))
    assert whole.finished
    assert torch.equal(whole.accuracies, build_accuracy_matrix([[90.0], [80.0, 70.0]]))
    assert (tmp_path / "accuracy.csv").read_text() == (
        'after task,"first, of two",second\n"first, of two",90.0\nsecond,80.0,70.0\n'
    )
    assert (tmp_path / "timing.csv").read_text() == (
        'task,phase,seconds\n"first, of two",train,2.0\n"first, of two",test,1.0\nsecond,test,1.5\n'
    )


def test_a_folder_that_is_no_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not the folder of a run"):
        read_summary(RunFolder(tmp_path))
