"""`sgp run --device` and `--precision`: the same commands on a device, stopped and resumed, for both trainers."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("yaml", reason="the command needs PyYAML, of the extra 'benchmarks'")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra 'benchmarks'")

from sgp.cli import main
from sgp.experiments.config import configure
from sgp.experiments.device import find_device, use_precision
from sgp.experiments.folder import RunError, RunFolder
from sgp.experiments.supervised import SupervisedTrainer

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::UserWarning")]

SMALL = ["--kind", "split", "--tasks", "2", "--epochs", "2", "--samples", "40", "--threads", "1"]
# Methods that were tried on a device: projections, penalties, replay, weight averages and realigned heads.
CASES: dict[str, list[str]] = {
    "finetune": [],
    "gpm": [],
    "sgp": [],
    "sgp --recipe fast": ["--recipe", "fast"],
    "sgp adam": ["--optimizer", "adam", "--lr", "0.001"],
    "sgp realigned": ["--average", "0.9", "--schedule", "cosine", "--realign", "--interpolation-weight", "0.2"],
    "ewc": [],
    "si": [],
    "er": [],
    "a-gem": [],
}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(name: str, case: str, *arguments: str) -> list[dict[str, object]]:
    """Run a case, and return its events."""
    method = case.partition(" ")[0]
    assert main(["run", "digits", "--method", method, *SMALL, *CASES[case], "--name", name, *arguments]) == 0
    return RunFolder(Path("runs") / name).read_events()


def read_accuracies(events: list[dict[str, object]]) -> torch.Tensor:
    return torch.tensor([event["accuracies"][0] for event in events if event["event"] == "task"])  # type: ignore[index]


@pytest.mark.parametrize("case", CASES)
def test_a_run_on_the_device_learns_what_a_run_on_the_cpu_learns(case: str, device: torch.device) -> None:
    there = read_accuracies(run("there", case, "--device", str(device)))
    here = read_accuracies(run("here", case))
    assert torch.allclose(there, here, atol=5.1)  # two of forty examples: sums are rounded in another order


@pytest.mark.parametrize("case", ["gpm", "ewc", "er"])
def test_a_run_in_bfloat16_is_autocast_on_the_device(
    case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[torch.dtype, torch.dtype]] = set()
    load = SupervisedTrainer.load_task

    def load_task(self: SupervisedTrainer, position: int) -> object:
        weight = next(self.network.parameters())
        rows = torch.ones(1, weight.shape[1], device=device)
        seen.add((weight.dtype, torch.nn.functional.linear(rows, weight).dtype))
        assert weight.device == device
        return load(self, position)

    monkeypatch.setattr(SupervisedTrainer, "load_task", load_task)
    run("low", case, "--device", str(device), "--precision", "bfloat16")
    assert seen == {(torch.float32, torch.bfloat16)}


@pytest.mark.parametrize("case", ["sgp", "sgp adam", "sgp realigned", "er"])
def test_a_run_on_the_device_resumes_to_the_same_bits(
    case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run("whole", case, "--device", str(device))
    save, saved = RunFolder.save, 0

    def stop(self: RunFolder, *state: object) -> None:
        nonlocal saved
        save(self, *state)  # type: ignore[arg-type]
        saved += 1
        if saved == 4:  # inside the second task
            raise KeyboardInterrupt

    method = case.partition(" ")[0]
    command = ["run", "digits", "--method", method, *SMALL, *CASES[case], "--name", "half", "--device", str(device)]
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", stop)
        assert main(command) == 130
    resumed = run("half", case, "--device", str(device), "--resume")
    assert torch.equal(read_accuracies(resumed), read_accuracies(whole))
    for file in ("accuracy.csv", "capacity.csv"):
        assert Path("runs/half", file).read_bytes() == Path("runs/whole", file).read_bytes()


def test_games_are_learned_on_the_device(device: torch.device) -> None:
    pytest.importorskip("minatar", reason="of the extra 'minatar'")
    pytest.importorskip("stable_baselines3", reason="of the extra 'rl'")
    options = ["--envs", "2", "--rollout", "16", "--batch", "16", "--epochs", "1", "--states", "20", "--steps", "32"]
    options += ["--evaluate-every", "1", "--evaluation-games", "1", "--episode-steps", "20", "--games", "breakout"]
    command = ["run", "minatar", "--method", "gpm", *options, "--memory-samples", "20", "--device", str(device)]
    assert main(command) == 0


def test_a_device_that_is_not_there_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("nothing", "meta:x", "cpux"):
        with pytest.raises((RunError, ValueError), match="device"):
            find_device(configure("digits", "sgp", device=name))
    assert main(["run", "digits", *SMALL, "--device", "nothing"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("sgp run: the device 'nothing' is not available (")
    assert error.count("\n") == 1
    assert not Path("runs").exists()


def test_float32_is_not_autocast(device: torch.device) -> None:
    rows = torch.ones(2, 3, device=device)
    for precision, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        with use_precision(configure("digits", "sgp", precision=precision), device):
            assert (rows @ rows.T).dtype == dtype
