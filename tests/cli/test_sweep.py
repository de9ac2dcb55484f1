"""``sgp sweep``: what it refuses and runs, how it resumes, and that no process or result is lost."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="the command needs PyYAML, of the extra 'benchmarks'")
pytest.importorskip("sklearn", reason="the command needs scikit-learn, of the extra 'benchmarks'")

from experiments.small import NOISE, events, run, trace
from rich.console import Console
from waiting import CEILING, wait_until

from sgp.benchmarks import BENCHMARKS
from sgp.cli import main
from sgp.cli.sweep_display import SweepDisplay, print_outcome
from sgp.experiments.config import configure
from sgp.experiments.folder import RunFolder
from sgp.experiments.jobs import Job
from sgp.experiments.sweep import Point

GRID = "benchmark: digits\nkind: split\ntasks: 2\nepochs: 1\nsamples: 40\nthreads: 1\n"


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    """Return a grid file of SGP with two values of alpha, and of GPM."""
    path = tmp_path / "grid.yaml"
    path.write_text(GRID + "method: [gpm, sgp]\nalpha: [1, 3]\n")
    return path


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sgp", "sweep", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def epochs(path: Path) -> int:
    metrics = path / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


@pytest.mark.parametrize(
    ("arguments", "clue"),
    [
        (["missing.yaml"], "there is no file 'missing.yaml'"),
        (["alpa"], "did you mean alpha?"),
        (["grid.yaml", "--import", "missing.py"], "there is no file 'missing.py'"),
        (["grid.yaml", "--jobs", "0"], "jobs must be at least 1, got 0"),
        (["grid.yaml", "--retries", "-1"], "retries must be at least 0, got -1"),
        (["grid.yaml", "--jobs", "2", "--ray", "auto"], "with --ray the cluster decides how many"),
        (["grid.yaml", "--ray", "atuo"], "ray must be auto, local or an address with a port, got 'atuo'"),
        (["grid.yaml", "--jbs", "2"], "--jbs"),
        (["wrong.yaml"], "no setting 'epoch': did you mean epochs"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_created(
    arguments: list[str], clue: str, grid: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (grid.parent / "wrong.yaml").write_text("benchmark: digits\nmethod: [sgp]\nepoch: 3\n")
    assert main(["sweep", *arguments]) == 2
    assert clue in capsys.readouterr().err
    assert not (grid.parent / "runs").exists()


def test_missing_data_are_reported_before_anything_runs(
    tmp_path: Path, here: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text("benchmark: [digits, split-cifar100]\nmethod: sgp\n")
    assert main(["sweep", str(file), "--data", str(tmp_path)]) == 1
    assert "cifar-100" in capsys.readouterr().err
    assert here == []
    assert not (tmp_path / "runs").exists()


def test_a_model_that_cannot_be_built_is_reported_before_anything_runs(
    tmp_path: Path, here: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    patterns = "method: sgp\nseed: [0, 1]\nthreshold: [0.9, {hidden.0: 0.5, '*': 0.9}, {conv1: 0.5, '*': 0.9}]\n"
    (tmp_path / "grid.yaml").write_text(GRID + patterns)
    assert main(["sweep", "grid.yaml"]) == 2
    name = "digits-sgp-paper-seed0-thresholdconv1_0.5___0.9"
    assert capsys.readouterr().err.startswith(f"sgp sweep: {name}: threshold: the pattern 'conv1' matches no module")
    assert here == []
    assert not (tmp_path / "runs").exists()


def test_one_model_of_each_kind_is_built_before_a_sweep(
    tmp_path: Path, here: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    monkeypatch.setattr("sgp.cli.launch_sweep.build_trainer", lambda config, *_: built.append(config.name))
    (tmp_path / "grid.yaml").write_text(GRID + "method: [finetune, sgp]\nseed: [0, 1]\nlr: [0.1, 0.2]\n")
    assert main(["sweep", "grid.yaml"]) == 0
    assert built == ["digits-finetune-paper-seed0", "digits-sgp-paper-seed0"]


def test_every_run_of_the_grid_equals_that_of_a_single_command(
    grid: Path, here: list[Job], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["sweep", "grid.yaml"]) == 0
    output = capsys.readouterr().out
    names = ["digits-gpm-paper-seed0", "digits-sgp-paper-seed0-alpha1", "digits-sgp-paper-seed0-alpha3"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == names
    assert "alpha does not apply to gpm" in output
    assert "3 of 3 runs are finished, in runs" in output
    config = configure("digits", "sgp", kind="split", tasks=2, epochs=1, samples=40, threads=1, alpha=3, seed=0)
    run(tmp_path / "alone", config)
    assert trace(tmp_path / "alone") == trace(tmp_path / "runs" / names[2])
    for number, (name, label) in enumerate(zip(names, ("gpm", "sgp alpha=1", "sgp alpha=3"), strict=True), start=1):
        score = events(tmp_path / "runs" / name)[-1]["acc"]
        assert f"{number}/3 {name}: ACC {score:.2f} %" in output
        assert re.search(rf"digits {label} +│ +1 │ +{score:.2f} │", output)


def test_the_table_has_the_mean_over_seeds(tmp_path: Path, here: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "grid.yaml").write_text(GRID + "method: finetune\nseed: [0, 1]\n")
    assert main(["sweep", "grid.yaml"]) == 0
    one, two = (events(tmp_path / f"runs/digits-finetune-paper-seed{seed}")[-1]["acc"] for seed in (0, 1))
    deviation = abs(one - two) / 2**0.5
    assert f"2 │ {(one + two) / 2:.2f} ± {deviation:.2f}" in capsys.readouterr().out


def test_one_failure_does_not_stop_the_rest_and_is_named(
    tmp_path: Path, here: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "grid.yaml").write_text(GRID + "method: sgp\nlr: [1e30, 0.1]\n")
    assert main(["sweep", "grid.yaml", "--out", "my runs"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5:] == [
        "1 of 2 runs are finished, in my runs",
        "failed: digits-sgp-paper-seed0-lr1e+30, exit status 1",
        "  sgp run: loss became NaN in task 1 (digits 0 and 1), epoch 1; try a lower --lr than 1e+30",
        "  its output is in my runs/digits-sgp-paper-seed0-lr1e+30/output.log",
        "try the failed runs again with: sgp sweep grid.yaml --out 'my runs'",
    ]
    assert [job.folder.name[-3:] for job in here] == ["+30", "0.1"]
    assert main(["sweep", "grid.yaml", "--out", "my runs"]) == 1
    assert [job.folder.name[-3:] for job in here] == ["+30", "0.1", "+30"]


def test_a_finished_sweep_runs_nothing_and_a_longer_one_only_new_runs(
    grid: Path, here: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "grid.yaml"]) == 0
    del here[:]
    capsys.readouterr()
    assert main(["sweep", "grid.yaml"]) == 0
    output = capsys.readouterr().out
    assert here == []
    assert "3 runs in runs, 3 of them already finished" in output
    assert "digits sgp alpha=3" in output
    grid.write_text(grid.read_text().replace("[1, 3]", "[1, 3, 9]"))
    assert main(["sweep", "grid.yaml"]) == 0
    assert [job.folder.name for job in here] == ["digits-sgp-paper-seed0-alpha9"]


def test_a_run_with_other_settings_is_refused_before_anything_runs(
    grid: Path, here: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "digits", "--method", "sgp", "--tasks", "1", "--name", "digits-sgp-paper-seed0-alpha3"]) == 0
    assert main(["sweep", "grid.yaml"]) == 1
    error = capsys.readouterr().err
    assert "runs/digits-sgp-paper-seed0-alpha3 is a run with other settings (" in error
    assert "alpha: 3.0, not 1.0" in error
    assert "use another --out" in error
    assert here == []


def test_a_resumed_run_keeps_its_number_of_threads(tmp_path: Path, here: list[Job]) -> None:
    config = configure("digits", "sgp", tasks=1, epochs=1, samples=40, threads=3)
    with RunFolder.begin(tmp_path / "runs" / config.name, config, resume=False):
        pass
    (tmp_path / "grid.yaml").write_text(
        "benchmark: digits\nmethod: sgp\ntasks: 1\nepochs: 1\nsamples: 40\nseed: [0, 1]\n"
    )
    assert main(["sweep", "grid.yaml", "--jobs", "1000"]) == 0
    assert [job.threads for job in here] == [3, 1]


@pytest.mark.parametrize(
    ("variable", "more", "arguments", "plan"),
    [
        ("", "", [], "4 in parallel, threads 2 each"),
        ("", "", ["--jobs", "3"], "3 in parallel, threads 2 each"),
        ("", "", ["--jobs", "8"], "8 in parallel, threads 1 each"),
        ("", "", ["--jobs", "100"], "100 in parallel, threads 1 each"),
        ("", "threads: 4\n", [], "2 in parallel, threads 4 each"),
        ("", "threads: 100\n", [], "1 in parallel, threads 100 each"),
        ("", "", ["--ray", "auto"], "on Ray at auto, threads 1 each"),
        ("2", "", [], "4 in parallel, threads 2 each"),
        ("4", "", [], "2 in parallel, threads 4 each"),
        ("100", "", [], "1 in parallel, threads 100 each"),
        ("1", "", ["--jobs", "2"], "2 in parallel, threads 1 each"),
        ("4,2", "", ["--jobs", "3"], "3 in parallel, threads 4 each"),
        ("many", "", [], "4 in parallel, threads 2 each"),
        ("3", "", ["--ray", "auto"], "on Ray at auto, threads 3 each"),
    ],
)
def test_the_cores_are_shared_by_the_runs_unless_the_environment_has_a_number_of_threads(
    variable: str,
    more: str,
    arguments: list[str],
    plan: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "grid.yaml").write_text(f"benchmark: digits\nmethod: sgp\nseed: [0, 1, 2, 3]\n{more}")
    assert main(["sweep", "grid.yaml", "--plan", *arguments]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"grid.yaml: 4 runs in runs; {plan}"


def test_device_and_precision_of_the_command_replace_those_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "grid.yaml").write_text("benchmark: digits\nmethod: [gpm, sgp]\ndevice: cpu\n")
    assert main(["sweep", "grid.yaml", "--plan", "--device", "cuda:1", "--precision", "bfloat16"]) == 0
    _, *commands = capsys.readouterr().out.splitlines()
    assert len(commands) == 2
    assert all("--device cuda:1 --precision bfloat16" in command for command in commands)


def test_a_plan_prints_the_commands_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "noise.py").write_text(NOISE, encoding="utf-8")
    (tmp_path / "grid.yaml").write_text(
        "benchmark: noise\nmethod: finetune\ncolour: [grey, rgb]\nthreads: 1\nepochs: 1\n"
    )
    assert main(["sweep", "grid.yaml", "--plan", "--import", "noise.py"]) == 0
    del BENCHMARKS._known["noise"]  # which each command imports for itself
    assert not (tmp_path / "runs").exists()
    *_, last = capsys.readouterr().out.splitlines()
    assert main(shlex.split(last)[1:]) == 0
    assert "colour: rgb" in (tmp_path / "runs/noise-finetune-paper-seed0-colourrgb/config.yaml").read_text()


def test_a_second_sweep_in_the_same_folder_is_refused(
    grid: Path, here: list[Job], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgp.cli.launch_sweep.PATIENCE", 0.1)
    config = configure("digits", "gpm", kind="split", tasks=2, epochs=1, samples=40, threads=1)
    with RunFolder.begin(grid.parent / "runs" / config.name, config, resume=False):
        assert main(["sweep", "grid.yaml"]) == 1
    error = capsys.readouterr().err
    assert "another process is running" in error
    assert "perhaps this sweep: wait for it, or use another --out" in error
    assert here == []
    assert main(["sweep", "grid.yaml"]) == 0


def test_a_damaged_run_does_not_stop_the_rest(grid: Path, here: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "grid.yaml"]) == 0
    damaged = grid.parent / "runs" / "digits-gpm-paper-seed0"
    (damaged / "metrics.jsonl").write_text("{\n")
    grid.write_text(grid.read_text().replace("[1, 3]", "[1, 3, 9]"))
    assert main(["sweep", "grid.yaml"]) == 1
    output = capsys.readouterr().out
    assert "3 of 4 runs are finished" in output
    assert "failed: digits-gpm-paper-seed0, exit status 1" in output


def write_event(event: str, **values: Any) -> str:
    """Return a line of metrics; values that the test does not care about are of some learned task."""
    if event == "task":
        values = {"name": "a", "accuracies": [50.0], "free": {}, "bytes": {}, "capacity": 100.0} | values
    if event == "game":
        values = {"update": 20, "step": 1, "scores": [], "normalised": [], "accumulated": None} | values
        values = {"name": "a", "free": {}, "bytes": {}, "capacity": 100.0} | values
    return json.dumps({"event": event} | values) + "\n"


def test_a_terminal_shows_the_progress_of_the_runs_within_80_columns(tmp_path: Path) -> None:
    name = "digits-sgp-" + 80 * "x" + "-alpha3"
    folders = {tmp_path / "begun": configure("digits", "gpm", tasks=4), tmp_path / name: configure("digits", "sgp")}
    for folder, content in zip(folders, (write_event("task", task=0), ""), strict=True):
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(content)
    console = Console(width=80, force_terminal=True, record=True)
    display = SweepDisplay(console, folders)
    assert not list(display.follow((Job(folder, (), 1), None) for folder in folders))
    with (tmp_path / "begun/metrics.jsonl").open("a") as metrics:
        metrics.write(write_event("task", task=1) + write_event("epoch", task=2, epoch=7))
    console.print(display.view())
    (_,) = display.follow(iter([(Job(tmp_path / "begun", (), 1), 9)]))
    console.print(display.view())
    shown = console.export_text()
    assert "0/2 runs" in shown
    assert re.search(r"begun +task 3/4, epoch 7", shown)
    assert re.search(r"…x+-alpha3 +starting", shown)
    assert "about" in shown
    assert re.search(r"1/2 begun: failed, exit status 9 \(0 s\)", shown)
    assert max(map(len, shown.splitlines())) <= 80


def test_the_progress_of_runs_on_games_is_shown(tmp_path: Path) -> None:
    config = configure("minatar", "sgp", steps=20 * 2048)
    (tmp_path / "run").mkdir()
    lines = write_event("game", task=0) + write_event("update", task=1, update=7)
    (tmp_path / "run/metrics.jsonl").write_text(lines)
    display = SweepDisplay(Console(), {tmp_path / "run": config, tmp_path / "other": config})
    assert not list(display.follow(iter([(Job(tmp_path / "run", (), 1), None)])))
    console = Console(width=80, record=True)
    console.print(display.view())
    assert re.search(r"run +task 2/3, update 7", console.export_text())
    assert display._before[tmp_path / "run"].share == pytest.approx(1 / 3)


def test_the_table_of_games_has_their_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = []
    for seed, reward in enumerate((1.0, 2.0)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        lines = [write_event("game", task=game, accumulated=reward * game) for game in range(2)]
        (folder / "metrics.jsonl").write_text("".join(lines) + write_event("end"))
        points.append((Point(str(seed), configure("minatar", "sgp", seed=seed), {"seed": seed}), folder))
    print_outcome(Console(width=80), points)
    output = capsys.readouterr().out
    assert re.search(r"minatar sgp +│ +2 │ +1.50 ± 0.71", output)
    assert "ACC" not in output
    config = points[0][0].config
    with SweepDisplay(Console(width=80), {tmp_path / "0": config}) as display:
        job = Job(tmp_path / "0", (), 1)
        assert list(display.follow(iter([(job, None), (job, 0)]))) == [(job, 0)]
    assert "1/1 0: reward 1.00" in capsys.readouterr().out


def test_games_that_cannot_be_played_are_reported_before_anything_runs(
    tmp_path: Path, here: list[Job], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("minatar", reason="of the extra 'minatar'")
    pytest.importorskip("stable_baselines3", reason="of the extra 'rl'")
    file = tmp_path / "grid.yaml"
    file.write_text("benchmark: minatar\nmethod: [gpm, sgp]\ngames: freewy\n")
    assert main(["sweep", str(file)]) == 2
    assert "no game 'freewy': did you mean freeway" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "minatar", None)
    file.write_text("benchmark: minatar\nmethod: [gpm, sgp]\n")
    assert main(["sweep", str(file)]) == 2
    assert "this needs minatar" in capsys.readouterr().err
    assert here == []
    assert not (tmp_path / "runs").exists()


LONG = "benchmark: digits\nmethod: sgp\ntasks: 2\nepochs: 50\nthreads: 1\n"


@pytest.mark.exhaustive
@pytest.mark.skipif(os.name != "posix", reason="nothing can be killed here as it is on POSIX")
def test_an_interrupted_and_a_killed_sweep_leave_no_process_and_resume_to_the_same_bits(
    tmp_path: Path,
) -> None:
    (tmp_path / "grid.yaml").write_text(LONG)
    path = tmp_path / "runs" / "digits-sgp-paper-seed0"
    config = configure("digits", "sgp", tasks=2, epochs=50, threads=1)
    run(tmp_path / "whole", config)

    sweep = started("grid.yaml")
    wait_until(lambda: epochs(path) > 3)
    sweep.terminate()  # handled like Ctrl-C, which a process in the background may ignore
    output, _ = sweep.communicate(timeout=CEILING)
    assert sweep.returncode == 130
    assert "Stopped with 0 of 1 runs finished; resume with: sgp sweep grid.yaml" in output
    assert "Stopped; resume with: sgp run" in (path / "output.log").read_text()
    assert not RunFolder(path).is_running()

    reached = epochs(path)
    assert 3 < reached < epochs(tmp_path / "whole")
    sweep = started("grid.yaml")
    wait_until(lambda: epochs(path) > reached + 3)
    sweep.kill()
    sweep.communicate()
    assert sweep.returncode == -signal.SIGKILL
    wait_until(lambda: not RunFolder(path).is_running())
    assert epochs(path) < epochs(tmp_path / "whole")

    sweep = started("grid.yaml")
    output, _ = sweep.communicate(timeout=CEILING)
    assert sweep.returncode == 0, output
    assert "resumed" in output
    assert trace(path) == trace(tmp_path / "whole")
