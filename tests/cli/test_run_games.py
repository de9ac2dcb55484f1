"""`sgp run` and `sgp show` on games."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="the command needs PyYAML, of the extra 'benchmarks'")
pytest.importorskip("stable_baselines3", reason="of the extra 'rl'")

from rl import signs
from rl.small import SMALL

from sgp.benchmarks import BENCHMARKS
from sgp.cli import main

STUB = ["--import", str(Path(signs.__file__))]
TINY = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def sgp(*arguments: str) -> int:
    BENCHMARKS._known.pop("signs", None)  # the command imports it again
    return main(list(arguments))


def test_a_stream_of_games_is_run_stopped_resumed_and_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = ["signs", *STUB, *TINY, "--memory-samples", "30", "--threshold", "0.9"]
    assert sgp("run", *stub) == 0
    output = capsys.readouterr().out
    assert "game 2/2 after 3/3 updates: two" in output
    assert "accumulated normalized reward" in output

    plays = iter(range(10**6))
    # The command imports the file again, so its class is another one with the same base.
    from sgp.rl.games import GameEnv

    step = GameEnv.step_wait

    def step_wait(self: GameEnv) -> object:
        if next(plays) == 60:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(GameEnv, "step_wait", step_wait)
    assert sgp("run", *stub, "--name", "again") == 130
    assert "Stopped; resume with: sgp run runs/again --resume" in capsys.readouterr().out
    monkeypatch.setattr(GameEnv, "step_wait", step)
    assert sgp("run", "runs/again", "--resume", *STUB) == 0
    assert "resuming after task" in capsys.readouterr().out
    for name in ("scores.csv", "accumulated.csv", "capacity.csv"):
        whole, again = (Path(f"runs/{run}/{name}").read_text() for run in ("signs-sgp-paper-seed0", "again"))
        assert whole == again
    # What is shown needs the settings' names, and so the file.
    BENCHMARKS._known["signs"] = signs.BENCHMARK
    assert main(["show", "runs/signs-sgp-paper-seed0", "runs/again"]) == 0
    output = capsys.readouterr().out
    assert "after 2 games" in output
    assert "kept" in output
    seen = json.loads(Path("runs/again/versions.json").read_text())[0]
    assert {"stable-baselines3", "gymnasium"} <= seen.keys()


@pytest.mark.parametrize(
    ("arguments", "clues"),
    [
        (["minatar", "--method", "hat"], ["hat cannot learn minatar", "finetune", "ewc", "gpm, sgp"]),
        (["atari", "--method", "er"], ["er cannot learn atari", "loss, the batch or the forward pass"]),
        (["atari", "--recipe", "fast"], ["no recipe 'fast' for atari"]),
        (["atari", "--samples", "5"], ["--samples"]),
        (["atari", "--games", "boxin"], ["no game 'boxin'", "boxing"]),
        (["atari", "--steps", "100"], ["steps must be at least the 2000 of one update"]),
        (["minatar", "--network", "lenet"], ["LeNet takes inputs of shape"]),
        (["atari", "--network", "actor-critc"], ["no network 'actor-critc'", "actor-critic"]),
        (["minatar", "--method", "ewc", "--optimizer", "adam-on-projected"], ["ewc projects no steps"]),
    ],
)
def test_a_mistake_is_reported_before_the_run_starts(
    arguments: list[str], clues: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[0] == "minatar":
        pytest.importorskip("minatar", reason="of the extra 'minatar'")
    assert sgp("run", *arguments) == 2
    captured = capsys.readouterr()
    assert all(clue in " ".join((captured.out + captured.err).split()) for clue in clues), captured
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("benchmark", "module", "message"),
    [
        ("minatar", "minatar", 'this needs minatar: pip install "sgp-torch[minatar]"'),
        ("minatar", "stable_baselines3", 'this needs stable-baselines3: pip install "sgp-torch[rl]"'),
        ("atari", "ale_py", 'this needs ale-py: pip install "sgp-torch[rl]"'),
        ("atari", "gymnasium", 'this needs gymnasium: pip install "sgp-torch[rl]"'),
    ],
)
def test_a_missing_extra_is_reported_in_one_line(
    benchmark: str, module: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert sgp("run", benchmark) == 2
    assert capsys.readouterr().err == f"sgp run: {message}\n"


def test_games_have_no_settings_of_supervised_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert sgp("run", "atari", "--method", "gpm", "--preset", "reference", "--help") == 0
    output = capsys.readouterr().out
    assert "--evaluate-every" in output
    assert "--sticky" in output
    assert "--norm-statistics" not in output
    assert "--patience" not in output


@pytest.mark.slow
def test_real_games_are_learned_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--envs", "4", "--rollout", "16", "--batch", "32", "--epochs", "1", "--states", "60", "--steps", "128"]
    options += ["--memory-samples", "60", "--evaluate-every", "2", "--evaluation-games", "1", "--episode-steps", "60"]
    options += ["--games", "boxing,space-invaders", "--network", "small-actor-critic"]
    assert sgp("run", "atari", "--method", "sgp", "--preset", "reference", *options) == 0
    assert "game 2/2 after 2/2 updates: boxing" in capsys.readouterr().out


def test_minatar_is_learned(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("minatar", reason="of the extra 'minatar'")
    options = ["--envs", "4", "--rollout", "16", "--batch", "32", "--epochs", "1", "--states", "60", "--steps", "128"]
    options += ["--evaluate-every", "2", "--evaluation-games", "1", "--episode-steps", "60"]
    assert sgp("run", "minatar", "--method", "gpm", *options, "--memory-samples", "60") == 0
    assert "game 3/3 after 2/2 updates: breakout" in capsys.readouterr().out
