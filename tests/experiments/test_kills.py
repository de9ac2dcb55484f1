"""Runs in processes that are killed, at random and at chosen moments, and resumed."""

import json
import multiprocessing
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="the command needs PyYAML, of the extra 'benchmarks'")
pytest.importorskip("sklearn", reason="the command needs scikit-learn, of the extra 'benchmarks'")

from experiments.small import NOISE, events, in_this_process, trace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="nothing can be killed here as it is on POSIX"),
]

# New processes are forked from one that has imported everything, so that many can be started and killed.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["sgp.cli.run", "sklearn.datasets", "torch._dynamo"])
PATIENCE = 120  # seconds until a test gives up


class Child:
    """A process that runs the command, until it ends or is killed."""

    def __init__(self, arguments: list[str]) -> None:
        self.process = SERVER.Process(target=in_this_process, args=(arguments,))
        self.process.start()

    def kill(self, when: Callable[[], bool], at: int = signal.SIGKILL) -> bool:
        """Send a signal at a moment; whether the run was still going on then."""
        begun = time.monotonic()
        while self.process.is_alive() and not when():
            assert time.monotonic() < begun + PATIENCE
            time.sleep(0.0005)
        assert self.process.pid is not None
        if self.process.is_alive():
            os.kill(self.process.pid, at)
        return self.end() == -at

    def end(self) -> int:
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None
        return self.process.exitcode


def command(path: Path, *more: str) -> list[str]:
    return ["run", *more, "--out", str(path.parent), "--name", path.name, "--threads", "1"]


def lines(path: Path) -> int:
    """How many events a run has written down, of which the last may be torn."""
    metrics = path / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


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
        *("noise", "--method", "gpm", "--network", "alexnet", "--statistics", "stored"),
        *("--epochs", "2", "--batch", "20"),
    ],
}


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_ends_with_the_same_bits(name: str, tmp_path: Path, noise: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    arguments = [*RUNS[name], *(["--import", str(noise)] if "noise" in RUNS[name] else [])]
    begun = time.monotonic()
    assert Child(command(whole, *arguments)).end() == 0
    taken = time.monotonic() - begun
    total = lines(whole)

    chance = random.Random(name)
    kills = 0
    # At moments that depend on the clock alone: also while nothing is there yet, and inside a checkpoint.
    for _ in range(4):
        at = time.monotonic() + chance.uniform(0, 0.6 * taken)
        kills += Child([*command(killed, *arguments), "--resume"]).kill(lambda at=at: time.monotonic() > at)  # type: ignore[misc]
    # Right after a line was written, which is before its checkpoint is.
    for wanted in sorted(chance.sample(range(1, total), min(4, total - 1))):
        kills += Child([*command(killed, *arguments), "--resume"]).kill(lambda wanted=wanted: lines(killed) >= wanted)  # type: ignore[misc]
    assert kills >= 3
    assert Child([*command(killed, *arguments), "--resume"]).end() == 0
    assert trace(killed) == trace(whole)
    assert (killed / "config.yaml").read_bytes() == (whole / "config.yaml").read_bytes()


def test_at_most_one_epoch_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "run"
    arguments = command(path, *DIGITS, "--epochs", "6")
    seen = 0
    for wanted in (3, 9, 16):
        assert Child([*arguments, "--resume"]).kill(lambda wanted=wanted: lines(path) >= wanted)  # type: ignore[misc]
        before = events(path) if (path / "metrics.jsonl").read_bytes().endswith(b"\n") else events(path)[:-1]
        child = Child([*arguments, "--resume"])
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
    begun = time.monotonic()
    while lines(path) < wanted:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < begun + PATIENCE
        time.sleep(0.002)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
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
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (130, "")
    last = output.splitlines()[-1]
    assert last.startswith("Stopped; resume with: sgp run ")
    assert not [file for file in path.rglob(".*") if file.name != ".lock"]

    again = shlex.split(last.partition("resume with: sgp ")[2])
    process = shell(*again)
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, "")
    assert Child(command(tmp_path / "whole", *arguments)).end() == 0
    assert trace(path) == trace(tmp_path / "whole")


def test_a_full_disk_is_told_and_the_run_goes_on_when_there_is_room(
    shell: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    resource = pytest.importorskip("resource")
    arguments = ("digits", "--tasks", "5", "--epochs", "2", "--threshold", "0.999", "--threads", "1")
    assert Child(command(tmp_path / "whole", *arguments)).end() == 0
    parts = json.loads((tmp_path / "whole" / "checkpoint.json").read_text())["parts"]
    sizes = {part: (tmp_path / "whole" / "checkpoint" / name).stat().st_size for part, name in parts.items()}
    # Files of the network may still be written, those of the bases no longer once there are many.
    room = (sizes["network"] + sizes["method"]) // 2
    assert sizes["network"] + 1000 < room < sizes["method"] - 1000
    path = Path("runs") / "digits-sgp-paper-seed0"
    process = shell("run", *arguments, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)))
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    (line,) = errors.splitlines()
    assert "File too large" in line
    assert line.endswith(f"the last checkpoint is kept, resume with: sgp run {path} --resume")
    path = tmp_path / path
    assert 0 < lines(path) < lines(tmp_path / "whole")
    assert not [file for file in path.rglob(".*") if file.name != ".lock"]

    assert Child(["run", str(path), "--resume"]).end() == 0
    assert trace(path) == trace(tmp_path / "whole")
