"""`sgp run` over several real processes: the run of a single one, in one folder, that can be killed and taken up."""

import multiprocessing
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("tyro", reason="the command needs tyro, of the extra 'benchmarks'")
pytest.importorskip("yaml", reason="the settings come from YAML files; of the extra 'benchmarks'")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra 'benchmarks'")

from training.small import events, in_a_team, of_kind, trace

from sgp.cli import main
from sgp.methods import METHODS
from sgp.runs.folder import RunFolder
from sgp.training.parallel import Team, usual_threads

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are forked and killed as on POSIX")

# New processes are forked from one that has imported everything, so that many can be started.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["sgp.cli.run", "sklearn.datasets", "torch._dynamo", "peft"])
PATIENCE = 120  # seconds until a test gives up
# What a batch that is split gives the same gradient for; a method that joins them is tested here by that.
ABLE = ["finetune", "multitask", "stl", "ewc", "gpm", "sgp", "frozen", "lora", "osf"]


class Together:
    """Processes that run one command, as torchrun would start them."""

    def __init__(self, out: Path, arguments: list[str], size: int = 2) -> None:
        out.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.outputs = [out / f"output{rank}.txt" for rank in range(size)]
        self.processes = [
            SERVER.Process(target=in_a_team, args=(rank, size, port, str(output), arguments))
            for rank, output in enumerate(self.outputs)
        ]
        for process in self.processes:
            process.start()

    def end(self) -> list[int | None]:
        """Exit statuses."""
        for process in self.processes:
            process.join(PATIENCE)
        return [process.exitcode for process in self.processes]

    def said(self) -> list[str]:
        return [output.read_text() for output in self.outputs]

    def wait(self, when: Callable[[], bool]) -> None:
        begun = time.monotonic()
        while not when():
            assert all(process.is_alive() for process in self.processes), self.said()
            assert time.monotonic() < begun + PATIENCE
            time.sleep(0.002)

    def kill(self, rank: int, number: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)


def command(path: Path, *more: str) -> list[str]:
    return ["run", *more, "--out", str(path.parent), "--name", path.name, "--threads", "1"]


def lines(path: Path) -> int:
    metrics = path / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def weights(path: Path) -> dict[str, Tensor]:
    found = RunFolder(path).load()
    assert found is not None
    return found[1]["network"]


def assert_alike(one: Path, other: Path, tolerance: float = 1e-4) -> None:
    """Same weights and same accuracies."""
    theirs = weights(other)
    for name, ours in weights(one).items():
        torch.testing.assert_close(ours, theirs[name], atol=tolerance, rtol=tolerance)
    ours, others = (of_kind(events(path), "task") for path in (one, other))
    assert [task["accuracies"] for task in ours] == [task["accuracies"] for task in others]
    for mine, their in zip(of_kind(events(one), "epoch"), of_kind(events(other), "epoch"), strict=True):
        for name in ("train_loss", "validation_loss"):
            assert mine[name] == pytest.approx(their[name], rel=10 * tolerance)


# A file for `--import`: networks with BatchNorm, of which one has dropout, and a method that does not keep the rules.
# Nothing in them has a kink, where rounding would turn into other gradients.
OURS = """
import os

import torch
from torch import nn

from sgp.methods import METHODS
from sgp.methods.finetune import Finetune
from sgp.networks import NETWORKS, Network
from sgp.networks.heads import Heads


class Smooth(nn.Module):
    def __init__(self, inputs, heads, *, statistics="batch", dropout=0.0):
        super().__init__()
        stored = statistics == "stored"
        self.conv, self.norm1 = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6, track_running_stats=stored)
        self.linear, self.norm2 = nn.Linear(216, 40, bias=False), nn.BatchNorm1d(40, track_running_stats=stored)
        # In place, as ours have it.
        self.silu, self.dropout = nn.SiLU(inplace=True), nn.Dropout(dropout)
        self.heads = Heads(40, heads)

    def forward(self, x, task=0):
        x = self.silu(self.norm1(self.conv(x.view(-1, 1, 8, 8)))).flatten(1)
        return self.heads(self.dropout(self.silu(self.norm2(self.linear(x)))), task)


def dropping(inputs, heads, **options):
    return Smooth(inputs, heads, dropout=0.3, **options)


class Apart(Finetune):
    name = "apart"

    def consolidate(self, batches, log_likelihood):
        with torch.no_grad():
            next(self.network.parameters()).add_(float(os.environ["RANK"]))


NETWORKS.add("smooth", Network("smooth", "without a kink", Smooth, ("statistics",)))
NETWORKS.add("dropping", Network("dropping", "with dropout", dropping, ("statistics",)))
METHODS.add("apart", Apart)
"""


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that make the file's networks known."""
    script = tmp_path_factory.mktemp("import") / "ours.py"
    script.write_text(OURS, encoding="utf-8")
    return ["--import", str(script)]


DIGITS = ["digits", "--kind", "split", "--tasks", "2", "--epochs", "3"]
RUNS: dict[str, list[str]] = {method: [*DIGITS, "--method", method] for method in ABLE} | {
    "patience": [*DIGITS, "--schedule", "patience", "--patience", "1"],
    "the fast recipe": [*DIGITS, "--recipe", "fast"],
    "realigned heads": [*DIGITS, "--recipe", "fast", "--realign"],
    "adam": [*DIGITS, "--optimizer", "adamw", "--lr", "0.001"],
    "several steps at once": [*DIGITS, "--project-every", "3"],
    "batches of one": [*DIGITS, "--samples", "5", "--batch", "1", "--lr", "0.01"],
    # Batches of odd sizes, so that processes have different shares of them.
    "batch statistics": [*DIGITS, "--network", "smooth", "--batch", "37", "--method", "ewc"],
    "stored statistics": [*DIGITS, "--network", "smooth", "--batch", "37", "--statistics", "stored"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_learn_what_one_does(name: str, tmp_path: Path, ours: list[str]) -> None:
    if name in ("lora", "osf"):
        pytest.importorskip("peft")
    arguments = [*RUNS[name], *(ours if "smooth" in RUNS[name] else [])]
    team = Together(tmp_path / "said", command(tmp_path / "two", *arguments))
    assert main(command(tmp_path / "one", *arguments)) == 0
    assert team.end() == [0, 0], team.said()
    assert_alike(tmp_path / "two", tmp_path / "one")
    # One folder, and one process that speaks.
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "said"}
    assert team.said()[1] == ""
    assert "ACC" in team.said()[0]


@pytest.mark.slow
def test_a_batch_of_fewer_examples_than_processes_counts_as_it_should(tmp_path: Path) -> None:
    # The last batch has two.
    arguments = [*DIGITS, "--samples", "66", "--method", "gpm"]
    team = Together(tmp_path, command(tmp_path / "three", *arguments), size=3)
    assert main(command(tmp_path / "one", *arguments)) == 0
    assert team.end() == [0, 0, 0], team.said()
    assert_alike(tmp_path / "three", tmp_path / "one")


def test_methods_that_split_batches_are_those_that_were_tried() -> None:
    assert [name for name in METHODS if METHODS[name].splits_batches] == ABLE


LONG = [*DIGITS, "--tasks", "3", "--epochs", "6", "--network", "dropping", "--statistics", "stored"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, ours: list[str]) -> Path:
    """The folder of a run of two processes, with dropout and BatchNorm."""
    path = tmp_path_factory.mktemp("whole") / "run"
    team = Together(path.parent, command(path, *LONG, *ours))
    assert team.end() == [0, 0], team.said()
    return path


@pytest.mark.slow
def test_a_killed_team_ends_with_the_same_bits(whole: Path, tmp_path: Path, ours: list[str]) -> None:
    path = tmp_path / "run"
    arguments = [*command(path, *LONG, *ours), "--resume"]
    for rank, wanted in ((1, 3), (0, 8)):
        team = Together(tmp_path, arguments)
        team.wait(lambda wanted=wanted: lines(path) >= wanted)  # type: ignore[misc]
        team.kill(rank, signal.SIGKILL)
        statuses = team.end()
        assert (statuses[rank], statuses[1 - rank]) == (-signal.SIGKILL, 1)
        assert team.said()[1] == ""
        if rank == 1:
            said = team.said()[0].splitlines()[-1]
            again = shlex.join(["torchrun", "--nproc-per-node", "2", "-m", "sgp", "run", str(path), "--resume", *ours])
            assert said == (
                "sgp run: another process of the run has ended; what was learned until the last checkpoint is kept, "
                f"go on with: {again}"
            )
    assert lines(path) < lines(whole)
    team = Together(tmp_path, arguments)
    assert team.end() == [0, 0], team.said()
    assert trace(path) == trace(whole)
    assert (path / "config.yaml").read_bytes() == (whole / "config.yaml").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["the first", "all"])
def test_a_signal_stops_all(ranks: tuple[int, ...], whole: Path, tmp_path: Path, ours: list[str]) -> None:
    path = tmp_path / "run"
    team = Together(tmp_path, command(path, *LONG, *ours))
    team.wait(lambda: lines(path) >= 2)
    for rank in ranks:
        team.kill(rank, signal.SIGTERM)
    assert all(status in (1, 130) for status in team.end()), team.said()
    assert "go on with: torchrun --nproc-per-node 2 -m sgp run" in team.said()[0].splitlines()[-1]
    assert team.said()[1] == ""
    assert not [file for file in path.rglob(".*") if file.name != ".lock"]
    assert lines(path) < lines(whole)
    team = Together(tmp_path, [*command(path, *LONG, *ours), "--resume"])
    assert team.end() == [0, 0], team.said()
    assert trace(path) == trace(whole)


@pytest.mark.slow
def test_torchrun_starts_it(whole: Path, tmp_path: Path, ours: list[str]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*torchrun, "-m", "sgp", *command(tmp_path / "run", *LONG, *ours)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=PATIENCE,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("ACC") == 1
    assert trace(tmp_path / "run") == trace(whole)


@pytest.mark.slow
def test_another_number_of_processes_is_refused(
    whole: Path, tmp_path: Path, ours: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(whole), "--resume", *ours]) == 2
    assert "processes is 2, and 1 run here: start the run by torchrun --nproc-per-node 2" in capsys.readouterr().err
    team = Together(tmp_path, ["run", str(whole), "--resume", *ours], size=3)
    assert team.end() == [2, 2, 2]
    assert "processes is 2, and 3 run here" in team.said()[0]
    assert main(command(tmp_path / "one", "digits", "--tasks", "1", "--epochs", "1")) == 0
    team = Together(tmp_path, ["run", str(tmp_path / "one"), "--resume"])
    assert team.end() == [1, 1]
    assert "is a run with other settings (processes: 2, not 1)" in team.said()[0]
    assert team.said()[1] == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "clue"),
    [
        (["digits", "--method", "er"], "er cannot be learned by 2 processes: its steps need whole batches; those that"),
        (["digits", "--method", "trgp"], f"those that can are {', '.join(ABLE)}"),
        (["minatar", "--method", "sgp"], "games are learned by one process: start minatar without torchrun"),
        (["digts"], "did you mean digits?"),
        (["digits", "--lrr", "1"], "--lrr"),
        (["digits", "--processes", "3"], "processes is 3, and 2 run here"),
    ],
    ids=str,
)
def test_what_cannot_be_is_told_once_before_a_folder_is_made(arguments: list[str], clue: str, tmp_path: Path) -> None:
    team = Together(tmp_path / "said", ["run", *arguments, "--out", str(tmp_path / "runs")])
    assert team.end() == [2, 2]
    assert clue in team.said()[0]
    assert team.said()[1] == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_processes_that_come_apart_are_told_of_it(tmp_path: Path, ours: list[str]) -> None:
    path = tmp_path / "run"
    team = Together(tmp_path, command(path, *DIGITS, "--method", "apart", *ours))
    assert team.end() == [1, 1]
    assert "the processes have come apart, they differ in network" in team.said()[0]
    # The checkpoint before it is there.
    found = RunFolder(path).load()
    assert found is not None
    assert found[0]["schedule"]["epochs"] == 3


@pytest.mark.parametrize(
    ("environment", "clue"),
    [
        ({"WORLD_SIZE": "2"}, "but not RANK and MASTER_ADDR and MASTER_PORT: start them by torchrun, or unset"),
        ({"RANK": "1"}, "but not WORLD_SIZE and MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "two", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "WORLD_SIZE='two'"),
        ({"RANK": "-1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK='-1'"),
        ({"RANK": "0", "WORLD_SIZE": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "no process RANK=0 of WORLD_SIZE=0"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "no process RANK=2 of WORLD_SIZE=2"),
    ],
    ids=str,
)
def test_half_an_environment_is_refused(
    environment: dict[str, str], clue: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "digits"]) == 2
    assert clue in capsys.readouterr().err


def test_one_process_of_torchrun_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(command(tmp_path / "run", "digits", "--tasks", "1", "--epochs", "1")) == 0


def test_processes_draw_their_own_dropout_and_the_first_that_of_a_single_one() -> None:
    assert [Team(rank, 3).stream for rank in range(3)] == [(), (1,), (2,)]
    assert Team().stream == ()


@pytest.mark.parametrize(("here", "threads"), [("2", 4), ("3", 2), ("16", 1), (None, 2)])
def test_each_process_has_its_part_of_the_cores(
    here: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if here is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    assert usual_threads(Team(1, 4)) == threads
    assert usual_threads(Team()) == torch.get_num_threads()
