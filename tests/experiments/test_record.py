"""The record of a run is what its metrics say, and a damaged or unfinished run is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="a run's config is a YAML file; of the extra 'benchmarks'")

from report.run_folders import make_rows
from report.run_folders import write_run as write_any_run

from sgp.experiments.config import configure
from sgp.experiments.folder import RunFolder
from sgp.experiments.record import RunError, read_record
from sgp.experiments.summary import read_summary


def write_digits(path: Path, *, end: bool = True, tasks: int = 3) -> Path:
    return write_any_run(path, configure("digits", "gpm", tasks=tasks, seed=4), make_rows(tasks), seconds=90.0, end=end)


def test_a_record_has_the_settings_and_what_the_summary_has(tmp_path: Path) -> None:
    record, summary = read_record(write_digits(tmp_path / "run")), read_summary(RunFolder(tmp_path / "run"))
    assert record.settings == summary.config.flat()
    assert [row[-1] for row in record.accuracies] == summary.accuracies.diagonal().tolist()
    assert (record.acc, record.bwt) == (79.0, -1.5)
    assert record.capacity == summary.last["capacity"]
    assert record.seconds == pytest.approx(sum(summary.seconds.values()))


def test_a_single_task_has_no_bwt(tmp_path: Path) -> None:
    assert read_record(write_digits(tmp_path / "run", tasks=1)).bwt is None


def test_an_unfinished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not finished: 3 tasks learned so far"):
        read_record(write_digits(tmp_path / "run", end=False))


def change_metrics(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    file = path / "metrics.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()]
    for event in events:
        change(event)
    file.write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.mark.parametrize(
    ("change", "clue"),
    [
        (lambda event: event.pop("accuracies", None), "cannot be read"),
        (lambda event: event.update(accuracies=[50.0]), "after task 2 there must be 2 accuracies"),
        (lambda event: event.update(accuracies="high"), "after task 1 there must be 1 accuracies, got 'high'"),
        (lambda event: event.update(capacity=None), "None is not a finite number"),
        (lambda event: event.update(capacity=float("nan")), "nan is not a finite number"),
        (lambda event: event.update(seconds={"train": "long"}), "'long' is not a finite number"),
        (lambda event: event.update(seconds=3), "cannot be read"),
    ],
)
def test_damaged_metrics_are_refused(tmp_path: Path, change: Callable[[dict[str, object]], object], clue: str) -> None:
    path = write_digits(tmp_path / "run")
    change_metrics(path, change)
    with pytest.raises(RunError, match=clue):
        read_record(path)


@pytest.mark.parametrize(
    "text", ["", "benchmark: [digits]\nmethod: gpm\n", "benchmark: digits\n", "tasks: 3\n", "- 1\n"]
)
def test_a_damaged_config_is_refused(tmp_path: Path, text: str) -> None:
    path = write_digits(tmp_path / "run")
    (path / "config.yaml").write_text(text)
    with pytest.raises(RunError, match="cannot be read"):
        read_record(path)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = write_digits(tmp_path / "run")
    (path / "config.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunError, match="cannot be read"):
        read_record(path)
    (path / "metrics.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(RunError):
        read_record(path)
