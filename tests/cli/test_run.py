"""``sgp run``: mistakes are reported before data are loaded, and the config of the command line is run."""

import itertools
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="the command needs PyYAML, of the extra 'benchmarks'")
pytest.importorskip("sklearn", reason="the command needs scikit-learn, of the extra 'benchmarks'")

from experiments.small import NOISE, events, trace

from sgp.benchmarks import BENCHMARKS, Benchmark
from sgp.cli import main
from sgp.cli.run import Place, Request, parse_request
from sgp.experiments.config import as_command, as_yaml, configure
from sgp.experiments.folder import RunFolder
from sgp.methods import METHODS
from sgp.paper import PRESETS, RECIPES, has_recipe

SMALL = ["--kind", "split", "--tasks", "2", "--epochs", "1", "--threads", "1"]
NAME = Path("runs") / "digits-sgp-paper-seed0"


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the loading of any data fail."""

    def fail(*_: object) -> Any:
        raise AssertionError("data were loaded")

    for name in list(BENCHMARKS):
        monkeypatch.setitem(BENCHMARKS._known, name, replace(BENCHMARKS[name], stream=fail))


MISTAKES: list[tuple[list[str], list[str]]] = [
    (["digts"], ["no benchmark 'digts'", "did you mean digits?"]),
    (["zzzzz"], ["no benchmark 'zzzzz'", "split-cifar100", "digits"]),
    (["digits", "--method", "sgpp"], ["no method 'sgpp'", "sgp"]),
    (["digits", "--method=gmp"], ["no method 'gmp'", "gpm"]),
    (["digits", "--preset", "refrence"], ["no preset 'refrence'", "reference"]),
    (["digits", "--recipe", "quick"], ["no recipe 'quick'", "fast"]),
    (["digits", "--network", "alexnt"], ["no network 'alexnt'", "alexnet"]),
    (["digits", "--method"], ["argument --method: expected one argument"]),
    (["digits", "--method", "--seed", "1"], ["argument --method: expected one argument"]),
    (["digits", "--import", "nothing.py"], ["there is no file 'nothing.py'"]),
    (["digits", "--lrr", "1"], ["--lrr", "--lr"]),
    (["digits", "--metod", "gpm"], ["--metod", "--method"]),
    (["digits", "--seed", "one"], ["--seed", "one"]),
    (["digits", "--seed", "-1"], ["seed must be from 0 to 4294967295", "-1"]),
    (["digits", "--seed", "4294967296"], ["seed must be from 0 to 4294967295", "4294967296"]),
    (["digits", "--name", ".."], ["--name must be the name of one folder", "'..'"]),
    (["digits", "--lr", "-1"], ["lr must be above 0", "-1"]),
    (["digits", "--lr", "nan"], ["lr must be above 0", "nan"]),
    (["digits", "--epochs", "0"], ["epochs must be at least 1", "0"]),
    (["digits", "--tasks", "0"], ["tasks must be", "at least 1", "0"]),
    (["digits", "--samples", "1"], ["samples must be at least 2", "1"]),
    (["digits", "--threshold", "2"], ["threshold must be in (0, 1]", "2.0"]),
    (["digits", "--alpha", "-1"], ["alpha must be at least 0", "-1.0"]),
    (["digits", "--kind", "splt"], ["no kind 'splt'", "did you mean split?"]),
    (["digits", "--method", "gpm", "--alpha", "1"], ["gpm on digits has no setting --alpha", "methods der and sgp"]),
    (["digits", "--games", "boxing"], ["no setting --games", "benchmarks atari and minatar"]),
    (["digits", "--envs", "3"], ["no setting --envs", "training on games"]),
    (["digits", "--learning-rate", "1"], ["did you mean --lr?"]),
    (["digits", "--gpu", "1"], ["did you mean --device?"]),
    (["digits", "--zzz", "1"], ["no setting --zzz", "sgp run digits --method sgp --help"]),
    (["digits", "-x"], ["sgp on digits has no setting --x"]),
    (["digits", "epochs", "3"], ["unexpected argument 'epochs'", "did you mean --epochs?"]),
    (["digits", "--lr"], ["argument --lr: expected one argument"]),
    (["digits", "--resume=yes"], ["argument --resume: ignored explicit argument 'yes'"]),
    (["digits", "--device", "Cuda?"], ["device must be a torch device", "Cuda?"]),
    (["digits", "--precision", "float16"], ["no precision 'float16'", "did you mean bfloat16 or float32?"]),
    (["cifar"], ["no benchmark 'cifar'", "did you mean cifar100-superclass or split-cifar100?"]),
    (["digits", "--schedule", "patience", "--validation", "0"], ["patience needs validation examples"]),
    (["split-cifar100", "--tasks", "11"], ["tasks must be from 1 to 10", "11"]),
    (["missing.yaml"], ["there is no file 'missing.yaml'"]),
    (["folder"], ["there is no file 'folder/config.yaml'"]),
    (["broken.yaml"], ["broken.yaml is not YAML"]),
    (["list.yaml"], ["list.yaml must have names and values"]),
    (["partial.yaml"], ["partial.yaml does not say which method"]),
    (["wrong.yaml"], ["sgp on digits has no setting lrate: did you mean lr"]),
    (["range.yaml"], ["lr must be above 0 and finite, got -3.0"]),
    (["type.yaml"], ["epochs must be a whole number, got 'many'"]),
]


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize(("arguments", "clues"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_a_mistake_is_reported_before_data_are_loaded(
    arguments: list[str], clues: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    both = "benchmark: digits\nmethod: sgp\n"
    contents = {
        "broken": "a: [",
        "list": "- a",
        "partial": "benchmark: digits",
        "wrong": f"{both}lrate: 1",
        "range": f"{both}lr: -3",
        "type": f"{both}epochs: many",
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.yaml").write_text(content, encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    assert main(["run", *arguments]) == 2
    captured = capsys.readouterr()
    message = " ".join((captured.out + captured.err).replace("│", " ").split())
    assert [clue for clue in clues if clue not in message] == []
    assert "Traceback" not in message
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "code", "clue"),
    [
        (
            ["split-cifar100"],
            1,
            "where is cifar100? Name the folder that holds it (--data DIR of a run) or set $SGP_DATA",
        ),
        (["split-cifar100", "--data", "nowhere"], 1, "there is no folder 'nowhere'"),
        # Inputs that the network does not take are reported before the data are looked for.
        (["split-miniimagenet", "--data", "nowhere", "--network", "lenet"], 2, "lenet takes inputs of shape"),
        (["five-datasets", "--data", "nowhere", "--network", "lenet", "--head-lr", "1"], 1, "no folder 'nowhere'"),
        (["permuted-mnist", "--data", "nowhere", "--network", "alexnet"], 2, "alexnet takes inputs of shape"),
        (["digits", "--network", "lenet"], 2, "lenet takes inputs of shape"),
        (["digits", "--threshold", "conv1", "0.5", "*", "0.9"], 2, "threshold: the pattern 'conv1' matches no module"),
        (["digits", "--memory-samples", "conv1", "5", "*", "9"], 2, "memory_samples: the pattern 'conv1' matches no"),
    ],
    ids=str,
)
def test_missing_data_and_settings_that_do_not_fit_them_are_reported_and_leave_no_folder(
    arguments: list[str], code: int, clue: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["run", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("sgp run: ")
    assert clue in captured.err
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]], ids=str)
def test_help_shows_what_can_be_run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *arguments]) == 0
    output = capsys.readouterr().out
    for word in ("BENCHMARK", "FILE.yaml", "RUN", "--method", "--preset", "--recipe", "--import", "--resume"):
        assert word in output


def test_help_of_a_benchmark_shows_the_values_of_the_method_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "split-cifar100", "--method", "sgp", "--help"]) == 0
    output = capsys.readouterr().out
    for word in ("--alpha", "Default: 10", "--threshold-step", "0.003", "--resume", "--data", "--epochs", "200"):
        assert word in output


def test_a_run_is_plain_lines_and_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "digits", *SMALL]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "\x1b" not in captured.out
    assert "\r" not in captured.out
    lines = captured.out.splitlines()
    assert lines[0] == f"{NAME}: sgp on digits, 2 tasks"
    assert lines[1].startswith("task 1/2 epoch 1/1: loss ")
    assert lines[2].startswith("task 1/2 digits 0 and 1: ")
    assert max(len(line) for line in lines[: lines.index("")] if not line.startswith("memory: ")) <= 80
    whole = RunFolder(tmp_path / NAME)
    assert whole.read_config() == configure("digits", "sgp", kind="split", tasks=2, epochs=1, threads=1)
    # Events for TensorBoard are there where that is installed.
    assert {file.name for file in (tmp_path / NAME).iterdir()} - {"tensorboard"} == {
        *("config.yaml", "versions.json", "metrics.jsonl", "checkpoint.json", "checkpoint", ".lock"),
        *("accuracy.csv", "capacity.csv", "memory.csv", "timing.csv"),
    }


def test_an_existing_run_is_not_changed_without_resume(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "digits", *SMALL]) == 0
    before = trace(tmp_path / NAME)
    assert main(["run", "digits", *SMALL]) == 1
    assert "already exists: resume it with --resume, or start another run with --name" in capsys.readouterr().err
    assert main(["run", str(NAME)]) == 1
    assert trace(tmp_path / NAME) == before
    assert main(["run", "digits", *SMALL, "--resume"]) == 0
    assert main(["run", str(NAME), "--resume"]) == 0
    assert trace(tmp_path / NAME) == before
    capsys.readouterr()
    assert main(["run", str(NAME), "--resume", "--lr", "0.2"]) == 1
    assert "other settings (lr: 0.2, not 0.1)" in capsys.readouterr().err
    assert trace(tmp_path / NAME) == before


def test_a_run_is_resumed_from_inside_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert main(["run", "digits", *SMALL]) == 0
    before = trace(tmp_path / NAME)
    monkeypatch.chdir(tmp_path / NAME)
    assert main(["run", ".", "--resume"]) == 0
    assert trace(tmp_path / NAME) == before
    assert not (tmp_path / NAME / "digits-sgp-paper-seed0").exists()


def test_a_file_is_run_and_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "benchmark: digits\nmethod: sgp\nkind: split\ntasks: 2\nepochs: 3\nlr: 5e-2\nseed: 2\nthreads: 1\n"
    )
    assert (
        main(["run", "mine.yaml", "--seed", "3", "--epochs", "1", "--method=gpm", "--out", "there", "--name", "x"]) == 0
    )
    config = RunFolder(tmp_path / "there" / "x").read_config()
    assert config == configure("digits", "gpm", kind="split", tasks=2, epochs=1, lr=0.05, seed=3, threads=1)


def test_a_run_is_resumed_from_a_folder_inside_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert main(["run", "digits", *SMALL]) == 0
    before = trace(tmp_path / NAME)
    monkeypatch.chdir(tmp_path / NAME / "checkpoint")
    assert main(["run", "..", "--resume"]) == 0
    assert trace(tmp_path / NAME) == before


def test_a_tilde_in_out_is_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    request = parse_request(["digits", "--out=~/runs", "--name", "mine"])
    assert request.place.find_folder(request.config) == tmp_path / "home" / "runs" / "mine"


def test_a_run_whose_config_has_changed_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "digits", *SMALL]) == 0
    config = tmp_path / NAME / "config.yaml"
    config.write_text(config.read_text().replace("tasks: 2", "tasks: 3"))
    before = trace(tmp_path / NAME)
    assert main(["run", str(NAME), "--resume"]) == 1
    assert f"{NAME / 'config.yaml'} has changed since the run was started" in capsys.readouterr().err
    assert trace(tmp_path / NAME) == before


def test_a_folder_with_the_name_of_a_benchmark_does_not_hide_it(tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    assert parse_request(["digits", "--seed", "4"]).config == configure("digits", "sgp", seed=4)


def test_arguments_become_a_request() -> None:
    request = parse_request(
        [
            *("digits", "--method=gpm", "--preset=reference", "--recipe", "fast", "--lr_min", "1e-4", "--data", "a"),
            "--resume",
        ]
    )
    config = configure("digits", "gpm", "reference", "fast", lr_min=1e-4)
    assert request == Request(config, Place(data=Path("a"), resume=True))
    patterns = ["--threshold", "hidden.0", "0.5", "*", "0.75", "--memory-samples", "7"]
    values = parse_request(["permuted-mnist", *patterns]).config.flat()
    assert values["threshold"] == {"hidden.0": 0.5, "*": 0.75}
    assert values["memory_samples"] == 7
    assert parse_request(["digits", "--alpha", "inf"]).config == configure("digits", "sgp", alpha=float("inf"))


@pytest.mark.parametrize("preset", PRESETS)
def test_the_shortest_command_of_a_config_parses_to_the_same_config(preset: str) -> None:
    for benchmark, method, recipe in itertools.product(BENCHMARKS, METHODS, RECIPES):
        games = not isinstance(BENCHMARKS[benchmark], Benchmark)
        if not has_recipe(benchmark, recipe) or (games and METHODS.facts(method).supervised_only):
            continue
        own = {"clip_values": None, "games": "breakout"} if games else {"samples": 50, "network_bias": True}
        for changes in ({}, {"seed": 3, "channels_last": False, "lr": 1e-5} | own):
            config = configure(benchmark, method, preset, recipe, **changes)
            program, command, *arguments = shlex.split(as_command(config))
            assert (program, command) == ("sgp", "run")
            assert parse_request(arguments).config == config
    config = configure("permuted-mnist", "gpm", preset, threshold={"hidden.*": 0.5, "*": 0.25}, memory_samples={"*": 9})
    assert parse_request(shlex.split(as_command(config))[2:]).config == config
    assert as_command(configure("digits", "sgp")) == "sgp run digits --method sgp"


METHOD = '''
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.methods import METHODS
from sgp.methods.finetune import Finetune


@dataclass(frozen=True)
class Settings:
    """Settings of my method."""

    strength: float = 2.0
    """How strong."""
    side: Literal["left", "right"] = "left"
    """Which side."""


class Mine(Finetune):
    name = "mine"
    description = "a method of my own"
    Settings = Settings

    def count_bytes(self) -> dict[str, int]:
        return {"strength": int(self.settings.strength)}


METHODS.add("mine", Mine)
'''


@pytest.fixture
def my_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that registers a method, which is removed after the test."""
    monkeypatch.setattr(METHODS, "_known", dict(METHODS._known))
    monkeypatch.setattr(BENCHMARKS, "_known", dict(BENCHMARKS._known))
    path = tmp_path / "my_method.py"
    path.write_text(METHOD, encoding="utf-8")
    return path


def test_a_users_method_is_run(my_method: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--import", str(my_method), "--method", "mine", "--strength", "7", "--side", "right"]
    assert main(["run", "digits", *SMALL, *arguments]) == 0
    path = tmp_path / "runs" / "digits-mine-paper-seed0"
    assert events(path)[1]["bytes"]["strength"] == 7
    assert "strength: 7.0" in (path / "config.yaml").read_text()
    capsys.readouterr()
    assert main(["run", "digits", "--import", str(my_method)]) == 2
    assert "the method 'mine' is already registered" in capsys.readouterr().err


def test_a_stopped_run_prints_how_to_resume_with_its_imports_and_data(
    my_method: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "my data").mkdir()
    arguments = [*SMALL, "--method", "mine", "--import", str(my_method), "--data", "my data", "--name", "[b]"]
    with monkeypatch.context() as patch:
        patch.setattr("sgp.experiments.supervised.SupervisedTrainer.run", interrupted)
        assert main(["run", "digits", *arguments]) == 130
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"Stopped; resume with: sgp run 'runs/[b]' --resume --data 'my data' --import {my_method}"
    METHODS._known.pop("mine")
    assert main(shlex.split(last.partition("sgp ")[2])) == 0
    assert events(tmp_path / "runs" / "[b]")[-1]["event"] == "end"


def test_a_users_benchmark_is_run_with_its_network(my_method: Path, tmp_path: Path) -> None:
    (tmp_path / "noise.py").write_text(NOISE, encoding="utf-8")
    assert (
        main(["run", "noise", "--import", "noise.py", "--epochs", "1", "--threads", "1", "--method", "finetune"]) == 0
    )
    path = tmp_path / "runs" / "noise-finetune-paper-seed0"
    assert "network: lenet" in (path / "config.yaml").read_text()


@pytest.mark.parametrize("name", ["batch", "test-batch"])
def test_batches_of_one_that_batchnorm_cannot_normalize_are_refused(
    name: str, my_method: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "noise.py").write_text(NOISE, encoding="utf-8")
    arguments = ["--network", "alexnet", "--method", "finetune", "--epochs", "1", "--samples", "4", f"--{name}", "1"]
    assert main(["run", "noise", "--import", "noise.py", *arguments]) == 2
    assert f"{name.replace('-', '_')} must be at least 2 for the BatchNorm of alexnet" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_loss_that_is_not_finite_is_reported_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "digits", *SMALL, "--lr", "1e30"]) == 1
    assert "loss became NaN in task 1 (digits 0 and 1), epoch 1; try a lower --lr" in capsys.readouterr().err


def test_training_that_a_method_refuses_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "digits", "--method", "apd", "--optimizer", "adamw", *SMALL]) == 1
    assert "sgp run: apd cannot train mlp this way: penalty=proximal requires optimizer=sgd" in capsys.readouterr().err


def test_a_run_whose_stdout_is_closed_prints_how_to_resume(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "sgp", "run", "digits", *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        (line,) = process.stderr.read().splitlines()
    assert process.wait() == 1
    assert line.startswith("sgp run: ")
    assert line.endswith(f"is kept, resume with: sgp run {NAME} --resume")


def test_a_damaged_checkpoint_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "digits", *SMALL]) == 0
    (tmp_path / NAME / "checkpoint.json").write_text("{")
    assert main(["run", str(NAME), "--resume"]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_a_preset_that_would_change_only_a_label_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "whole.yaml"
    file.write_text(as_yaml(configure("digits", "sgp")))
    assert main(["run", str(file), "--preset", "reference"]) == 2
    assert "sgp run digits --preset reference" in capsys.readouterr().err
    for some in ("preset: paper\n", ""):
        file.write_text(f"benchmark: digits\nmethod: sgp\n{some}")
        assert parse_request([str(file), "--preset", "reference"]).config == configure("digits", "sgp", "reference")
        assert parse_request([str(file), "--recipe", "fast"]).config == configure("digits", "sgp", recipe="fast")


@pytest.mark.parametrize(
    ("arguments", "clue"),
    [
        (["digits", "--benchmark", "split-cifar100"], "the benchmark is 'digits'"),
        (["--method", "sgp"], "name a benchmark, a config file or a run's folder before --method"),
        (["five-datasets", "--recipe", "fast"], "no recipe 'fast'"),
    ],
)
def test_arguments_that_contradict_the_benchmark_are_refused(
    arguments: list[str], clue: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == 2
    assert clue in capsys.readouterr().err


def test_a_name_cannot_leave_the_folder_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "digits", "--name", "../elsewhere", "--out", str(tmp_path / "runs")]) == 2
    assert "--name must be the name of one folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_other_versions_are_reported_when_a_run_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "run",
        "digits",
        "--tasks",
        "1",
        "--epochs",
        "1",
        "--samples",
        "40",
        "--out",
        str(tmp_path),
        "--name",
        "a",
    ]
    assert main(command) == 0
    for content in ('[{"torch": "1.0"}]', "[{"):  # the second was torn: it is a note, and no reason to stop
        (tmp_path / "a" / "versions.json").write_text(content)
        capsys.readouterr()
        assert main([*command, "--resume"]) == 0
        output = " ".join(capsys.readouterr().out.split())
        assert "already finished" in output
        assert ("torch 1.0" in output) == ("1.0" in content)


def test_a_run_that_does_not_exist_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["runs/nothing"], ["nothing", "--resume"]):
        assert main(["run", *command]) == 2
        assert "there is no folder" in capsys.readouterr().err


def test_a_recorded_config_is_repeated_whatever_the_papers_settings_are_now(tmp_path: Path) -> None:
    config = configure("split-cifar100", "gpm", recipe="fast")
    older = [line for line in as_yaml(config).splitlines() if not line.startswith("average")]
    (tmp_path / "config.yaml").write_text("\n".join(older) + "\n")
    (tmp_path / "versions.json").write_text("[]")
    for target in (tmp_path, tmp_path / "config.yaml"):
        again = parse_request([str(target)]).config
        assert (config.trainer.average, again.trainer.average) == (0.99, 0.0)
