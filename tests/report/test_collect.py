"""Runs that are in a report, and the reasons for those that are not."""

from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="configs are YAML files; of the extra 'benchmarks'")

from report.run_folders import make_rows, write_digits_run, write_games_run, write_run

from sgp.experiments.config import configure
from sgp.report.collect import collect_runs


def test_all_runs_in_a_folder_are_collected(tmp_path: Path) -> None:
    write_digits_run(tmp_path / "some", "gpm")
    write_digits_run(tmp_path / "some" / "deeper", "sgp")
    found = collect_runs([tmp_path])
    assert {run.config.method for run in found.runs} == {"gpm", "sgp"}
    assert found.left_out == []


def test_a_run_that_is_named_twice_is_collected_once(tmp_path: Path) -> None:
    path = write_digits_run(tmp_path, "gpm")
    found = collect_runs([path, tmp_path, path])
    assert len(found.runs) == 1
    assert found.left_out == []


def test_a_copy_of_a_run_is_left_out_by_name(tmp_path: Path) -> None:
    write_digits_run(tmp_path, "gpm", name="a")
    write_run(tmp_path / "b", configure("digits", "gpm", threads=2), make_rows(10))
    found = collect_runs([tmp_path])
    assert [run.name for run in found.runs] == ["a"]
    (left,) = found.left_out
    assert left.path == tmp_path / "b"
    assert "the same run as" in left.reason


def test_an_unfinished_run_is_left_out_with_its_progress(tmp_path: Path) -> None:
    write_run(tmp_path / "half", configure("digits", "gpm", threads=1), make_rows(4), end=False)
    write_run(tmp_path / "fresh", configure("digits", "sgp", threads=1), [], end=False)
    found = collect_runs([tmp_path])
    assert found.runs == []
    assert {left.path.name: left.reason.partition(";")[0] for left in found.left_out} == {
        "half": "not finished: 4 tasks learned so far",
        "fresh": "not finished: no task learned yet",
    }


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("metrics.jsonl", "nothing\n", "damaged in line 1"),
        ("metrics.jsonl", '{"event": "task"}\n{"event": "end"}\n', "is damaged in line 1"),
        (
            "metrics.jsonl",
            '{"event": "task", "name": 3, "accuracies": [1]}\n{"event": "end"}\n',
            "is damaged in line 1",
        ),
        ("config.yaml", "method: [", "cannot be read"),
        ("config.yaml", "benchmark: digits\nmethod: nobody\n", "nobody"),
    ],
)
def test_a_damaged_run_does_not_affect_the_others(tmp_path: Path, name: str, content: str, reason: str) -> None:
    write_digits_run(tmp_path, "gpm")
    bad = write_digits_run(tmp_path, "sgp")
    (bad / name).write_text(content)
    found = collect_runs([tmp_path])
    assert [run.config.method for run in found.runs] == ["gpm"]
    (left,) = found.left_out
    assert left.path == bad
    assert reason in left.reason


@pytest.mark.parametrize("event", ["task", "game"])
def test_a_run_without_one_of_its_lines_does_not_affect_the_others(tmp_path: Path, event: str) -> None:
    write_digits_run(tmp_path, "gpm")
    bad = write_digits_run(tmp_path, "sgp", tasks=3) if event == "task" else write_games_run(tmp_path, "sgp")
    lines = (bad / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines.remove(next(line for line in lines if f'"event": "{event}"' in line))
    (bad / "metrics.jsonl").write_text("".join(lines))
    found = collect_runs([tmp_path])
    assert [run.config.method for run in found.runs] == ["gpm"]
    (left,) = found.left_out
    assert "metrics are damaged" in left.reason


def test_an_infinite_accuracy_is_damage(tmp_path: Path) -> None:
    config = configure("digits", "gpm", threads=1)
    write_run(tmp_path / "run", config, [[80.0], [80.0, float("nan")]])
    assert collect_runs([tmp_path]).runs == []


def test_folders_without_runs_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    found = collect_runs([tmp_path / "empty", tmp_path / "nowhere"])
    assert [left.reason for left in found.left_out] == ["there is no run in it", "there is no such folder"]


def test_runs_on_games_are_collected(tmp_path: Path) -> None:
    write_games_run(tmp_path, "sgp")
    (run,) = collect_runs([tmp_path]).runs
    assert run.is_game
    assert run.names == ["breakout", "freeway"]
    assert [len(each["scores"]) for each in run.evaluations] == [1, 1, 1, 2, 2, 2]
    assert run.seconds == 180
