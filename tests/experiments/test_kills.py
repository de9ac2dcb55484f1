"""Runs in processes that are killed, at random and at chosen moments, and resumed."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="the command needs PyYAML, of the extra 'benchmarks'")
pytest.importorskip("sklearn", reason="the command needs scikit-learn, of the extra 'benchmarks'")

from experiments.processes import Child, command, lines, run_command
from experiments.small import NOISE, events, in_this_process, run_until_killed, trace
from waiting import CEILING, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="nothing can be killed here as it is on POSIX"),
]

KILLS = 8


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    script = tmp_path_factory.mktemp("import") / "noise.py"
    script.write_text(NOISE, encoding="utf-8")
    return script


DIGITS = ["digits", "--kind", "split"]
RUNS = {
    "sgp with patience": [*DIGITS, "--method", "sgp", "--schedule", "patience", "--epochs", "3"],
    "gpm with the fast recipe": [*DIGITS, "--method", "gpm", "--recipe", "fast", "--epochs", "2", "--tasks", "3"],
    "finetuning": [*DIGITS, "--method", "finetune", "--epochs", "2", "--tasks", "3"],
    "sgp with LeNet": ["noise", "--epochs", "2", "--batch", "16"],
    "gpm with AlexNet": [
        *("noise", "--method", "gpm", "--network", "alexnet", "--norm-statistics", "stored"),
        *("--epochs", "2", "--batch", "20"),
    ],
}
SHORTEST = "sgp with LeNet"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == SHORTEST else [pytest.mark.exhaustive]) for name in RUNS]
)
def test_a_killed_run_ends_with_the_same_bits(name: str, tmp_path: Path, noise: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    arguments = [*RUNS[name], *(["--import", str(noise)] if "noise" in RUNS[name] else [])]
    assert run_command(command(whole, *arguments)) == 0
    chance = random.Random(name)
    again = [*command(killed, *arguments), "--resume"]
    total = lines(whole)
    for wanted in sorted(chance.sample(range(total - 1), min(KILLS, total - 1))):
        child = Child(run_until_killed, wanted, chance.randint(1, 4), str(killed), again)
        assert child.end() == -signal.SIGKILL
    assert run_command(again) == 0
    assert trace(killed) == trace(whole)
    assert (killed / "config.yaml").read_bytes() == (whole / "config.yaml").read_bytes()


def test_at_most_one_epoch_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "run"
    arguments = command(path, *DIGITS, "--epochs", "50")  # far more than are seen, however late a kill comes
    seen = 0
    for wanted in (3, 9, 16):
        assert Child(in_this_process, [*arguments, "--resume"]).kill(lambda wanted=wanted: lines(path) >= wanted)  # type: ignore[misc]
        before = events(path) if (path / "metrics.jsonl").read_bytes().endswith(b"\n") else events(path)[:-1]
        child = Child(in_this_process, [*arguments, "--resume"])
        # The first thing that is written anew is at most one line back.
        child.kill(lambda: lines(path) > len(before))  # noqa: B023
        after = events(path)
        assert after[: len(before)] == before
        seen = max(seen, len(after))
    assert seen > 16


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start `python -m sgp` as a user would, in a folder of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **named: object) -> "subprocess.Popen[str]":
        # Where these tests run in the background a signal of the keyboard may be ignored, and that is inherited.
        named = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)} | named
        process = subprocess.Popen(
            [sys.executable, "-m", "sgp", *arguments],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **named,  # type: ignore[call-overload]
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for(path: Path, wanted: int, process: "subprocess.Popen[str]") -> None:
    wait_until(lambda: lines(path) >= wanted or process.poll() is not None)
    assert process.poll() is None, process.communicate()


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="SIGINT"),
        pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.exhaustive),
    ],
)
def test_a_signal_stops_cleanly_and_says_how_to_go_on(
    number: signal.Signals, shell: Callable[..., "subprocess.Popen[str]"], tmp_path: Path, noise: Path
) -> None:
    # A name that a shell, and the markup of the display, would take apart.
    path = tmp_path / "my runs" / "[bold] one"
    # Long enough that the signal comes before the end also on a busy machine.
    arguments = ("noise", "--epochs", "25", "--lr", "1e-3", "--batch", "20", "--threads", "1", "--import", str(noise))
    process = shell("run", *arguments, "--out", "my runs", "--name", "[bold] one")
    wait_for(path, 2, process)
    process.send_signal(number)
    output, errors = process.communicate(timeout=CEILING)
    assert (process.returncode, errors) == (130, "")
    last = output.splitlines()[-1]
    assert last.startswith("Stopped; resume with: sgp run ")
    assert not [file for file in path.rglob(".*") if file.name != ".lock"]

    again = shlex.split(last.partition("resume with: sgp ")[2])
    process = shell(*again)
    output, errors = process.communicate(timeout=CEILING)
    assert (process.returncode, errors) == (0, "")
    assert run_command(command(tmp_path / "whole", *arguments)) == 0
    assert trace(path) == trace(tmp_path / "whole")


def test_a_full_disk_is_told_and_the_run_goes_on_when_there_is_room(
    shell: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    resource = pytest.importorskip("resource")
    arguments = ("digits", "--tasks", "5", "--epochs", "2", "--threshold", "0.999", "--threads", "1")
    assert run_command(command(tmp_path / "whole", *arguments)) == 0
    parts = json.loads((tmp_path / "whole" / "checkpoint.json").read_text())["parts"]
    sizes = {part: (tmp_path / "whole" / "checkpoint" / name).stat().st_size for part, name in parts.items()}
    # Files of the network may still be written, those of the bases no longer once there are many.
    room = (sizes["network"] + sizes["method"]) // 2
    assert sizes["network"] + 1000 < room < sizes["method"] - 1000
    path = Path("runs") / "digits-sgp-paper-seed0"
    process = shell("run", *arguments, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)))
    _, errors = process.communicate(timeout=CEILING)
    assert process.returncode == 1
    (line,) = errors.splitlines()
    assert "File too large" in line
    assert line.endswith(f"the last checkpoint is kept, resume with: sgp run {path} --resume")
    path = tmp_path / path
    assert 0 < lines(path) < lines(tmp_path / "whole")
    assert not [file for file in path.rglob(".*") if file.name != ".lock"]

    assert run_command(["run", str(path), "--resume"]) == 0
    assert trace(path) == trace(tmp_path / "whole")
