"""``sgp show``: results of runs, finished or not, compared with each other and with the paper."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

pytest.importorskip("yaml", reason="the command needs PyYAML, of the extra 'benchmarks'")
pytest.importorskip("sklearn", reason="the command needs scikit-learn, of the extra 'benchmarks'")

from report.run_folders import write_games_run

from sgp.cli import main
from sgp.cli.show import print_summary
from sgp.experiments.config import Config, configure
from sgp.experiments.folder import RunFolder
from sgp.experiments.summary import Summary, read_summary


def written(path: Path, config: Config[Any], rows: list[list[float]], *, end: bool = True) -> Path:
    """Write the folder of a run without running it."""
    with RunFolder.begin(path, config, resume=False) as folder:
        for task, row in enumerate(rows):
            folder.log("epoch", task=task, seconds={"train": 90.0})
            extra: dict[str, Any] = {"free": {"hidden.0": 0.25}, "capacity": 100.0}
            sizes = {"network": 2**20, "bases": 2**19}
            folder.log("task", task=task, name=f"[b] task {task}", accuracies=row, bytes=sizes, seconds={}, **extra)
        if end:
            folder.log("end", acc=1.0)
    return path


def test_a_finished_run_is_shown_with_its_matrix_and_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "[red] run", configure("digits", "gpm", tasks=2, seed=3), [[90.0], [80.0, 75.25]])
    assert main(["show", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{path}: gpm on digits, preset paper, recipe paper, seed 3"
    assert lines[2].split() == ["after", "1", "2"]
    assert lines[3].split() == ["1", "[b]", "task", "0", "90.0"]
    assert lines[4].split() == ["2", "[b]", "task", "1", "80.0", "75.2"]
    assert lines[5:8] == [
        "ACC 77.62 %, BWT -10.00 %",
        "time 3 min 00 s: train 100 %",
        "memory: network 1.0 MiB, bases 0.5 MiB; network capacity 100 %",
    ]
    assert lines[8] == "free: hidden.0 25 %"
    assert not any("not finished" in line for line in lines)


def test_lines_are_broken_between_words_in_a_terminal_only(tmp_path: Path) -> None:
    config = configure("digits", "gpm", tasks=2)
    summary = read_summary(RunFolder(written(tmp_path / "run", config, [[90.0], [80.0, 75.25]])))
    shown = {}
    for is_terminal in (True, False):
        console = Console(width=40, force_terminal=is_terminal, no_color=True, record=True, file=io.StringIO())
        print_summary(console, "run " * 9, summary)
        shown[is_terminal] = console.export_text().splitlines()
    line = "memory: network 1.0 MiB, bases 0.5 MiB; network capacity 100 %"
    assert line in shown[False]
    assert line not in shown[True]
    assert max(len(each) for each in shown[True]) <= 40
    assert line in " ".join(" ".join(shown[True]).split())  # no word is broken


def test_a_whole_run_is_shown_with_the_papers_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[70.0] * (task + 1) for task in range(10)]
    whole = written(tmp_path / "whole", configure("split-cifar100", "sgp"), rows)
    cut = written(tmp_path / "cut", configure("split-cifar100", "sgp", epochs=5), rows)
    unfinished = written(tmp_path / "unfinished", configure("split-cifar100", "sgp"), rows[:9], end=False)
    assert main(["show", str(whole)]) == 0
    assert "ACC 70.00 % (paper 76.05 ± 0.43), BWT 0.00 % (paper -1.0)" in capsys.readouterr().out
    for other in (cut, unfinished):
        assert main(["show", str(other)]) == 0
        assert "paper 76" not in capsys.readouterr().out


def test_an_unfinished_run_is_shown_up_to_its_last_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "run", configure("digits", "gpm"), [[90.0]], end=False)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "ta')
    assert main(["show", str(path)]) == 0
    output = capsys.readouterr().out
    assert "ACC 90.00 %\n" in output
    assert "not finished: resume it with `sgp run RUN --resume`" in output
    empty = written(tmp_path / "empty", configure("digits", "gpm"), [], end=False)
    assert main(["show", str(empty)]) == 0
    assert "no task has been learned yet" in capsys.readouterr().out


def test_several_runs_are_compared_over_the_tasks_they_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = written(tmp_path / "one", configure("digits", "gpm"), [[90.0], [80.0, 70.0]])
    two = written(tmp_path / "two", configure("digits", "sgp"), [[92.0], [82.0, 74.0], [1.0, 1.0, 1.0]], end=False)
    assert main(["show", str(one), str(two)]) == 0
    output = capsys.readouterr().out
    assert "after 2 tasks " in output
    assert output.endswith("\nFWT is relative to the first run\n")
    rows = [line.strip("│ ").split() for line in output.splitlines() if line.startswith("│")]
    cells = {row[0]: [cell for cell in row if cell not in ("│", "min", "s")] for row in rows}
    assert cells["one"][1:4] == ["75.00", "-10.00", "+0.00"]
    assert cells["two"][1:4] == ["78.00", "-10.00", "+3.00"]
    assert cells["two"][-1] == "0.5"


def test_runs_of_different_benchmarks_and_empty_ones_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = written(tmp_path / "one", configure("digits", "gpm"), [[90.0]])
    other = written(tmp_path / "other", configure("permuted-mnist", "gpm"), [[90.0]])
    empty = written(tmp_path / "empty", configure("digits", "gpm"), [])
    for pair in ((one, other), (one, empty)):
        assert main(["show", *map(str, pair)]) == 0
        assert "FWT" not in capsys.readouterr().out


def test_runs_on_games_are_compared_over_the_games_that_all_have_learned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two, other = write_games_run(tmp_path, "sgp"), write_games_run(tmp_path, "gpm")
    one = write_games_run(tmp_path, "finetune", names=["breakout"])
    elsewhere = write_games_run(tmp_path, "ewc", names=["freeway"])
    shown = {}
    for name, pair in (("two", (two, other)), ("one", (two, one)), ("none", (one, elsewhere))):
        assert main(["show", *map(str, pair)]) == 0
        shown[name] = capsys.readouterr().out
    assert re.search(r"│ +2.00 │ +1.00 │", shown["two"])
    assert "after one game" in shown["one"]
    assert re.search(r"│ +1.00 │ +│", shown["one"])  # there is no earlier game to have kept
    assert "reward: accumulated" not in shown["none"]


def test_a_missing_line_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "run", configure("digits", "gpm"), [[90.0], [80.0, 75.0]])
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[2:]))
    assert main(["show", str(path)]) == 1
    assert "after task 1 there are 2 accuracies, of 1 tasks" in capsys.readouterr().err


@pytest.mark.parametrize("target", [".", "nothing"], ids=["not a run", "not there"])
def test_a_path_that_is_not_a_run_is_reported(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", target]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"sgp show: {target} is not the folder of a run: there is no config.yaml\n"


def test_damaged_metrics_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "run", configure("digits", "gpm"), [[90.0]])
    (path / "metrics.jsonl").write_text("nothing\n")
    assert main(["show", str(path)]) == 1
    assert "metrics.jsonl is damaged in line 1" in capsys.readouterr().err


@pytest.mark.parametrize(("tasks", "value"), [(1, 100.0), (2, 99.96), (5, 100.0), (10, 100.0), (20, 99.4)])
def test_a_table_is_whole_at_eighty_columns(tasks: int, value: float, capsys: pytest.CaptureFixture[str]) -> None:
    matrix = torch.full((tasks, tasks), value, dtype=torch.float64).tril()
    names = [f"a task with quite a long name {task}" for task in range(tasks)]
    rows = matrix.tolist()
    events = [
        {"name": name, "accuracies": rows[task][: task + 1], "free": {}, "bytes": {"network": 1}, "capacity": 100.0}
        for task, name in enumerate(names)
    ]
    summary = Summary(configure("digits", "sgp"), events, {"train": 1.0}, finished=True)
    print_summary(Console(width=80), "run", summary)
    lines = capsys.readouterr().out.splitlines()
    number = f"{value:.1f}" if tasks <= 10 else f"{value:.0f}"
    assert lines[2].split() == ["after", *(str(task + 1) for task in range(tasks))]
    for task, line in enumerate(lines[3 : 3 + tasks]):
        assert len(line.rstrip()) <= 80
        assert line.startswith(f"{task + 1} a task")
        assert line.split("…")[1].split() == [number] * (task + 1)
    assert lines[3 + tasks].startswith("ACC ")


def test_the_command_without_arguments_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show"]) == 0
    assert "sgp show" in capsys.readouterr().out
