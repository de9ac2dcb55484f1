"""Events for TensorBoard are written where it is installed, and nothing is asked for where it is not."""

import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("yaml", reason="the settings come from YAML files; of the extra 'benchmarks'")

from sgp.experiments import tensorboard


class Writer:
    """Stands in for TensorBoard's."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.scalars: dict[tuple[str, int], float] = {}
        self.flushed = 0
        written.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert isinstance(value, float | int)
        self.scalars[name, step] = value

    def flush(self) -> None:
        self.flushed += 1


written: list[Writer] = []


def test_without_it_nothing_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    assert tensorboard.make_tensorboard_callbacks(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    written.clear()


@pytest.mark.usefixtures("_installed")
def test_with_it_epochs_and_tasks_become_scalars(tmp_path: Path) -> None:
    (watch,) = tensorboard.make_tensorboard_callbacks(tmp_path)
    (writer,) = written
    losses = {"train_loss": 0.5, "validation_loss": None, "validation_accuracy": None, "lr": 0.1}
    watch("epoch", {"task": 0, "epoch": 2} | losses)
    watch("task", {"task": 1, "accuracies": [80.0, 60.0]})
    assert writer.folder == str(tmp_path / "tensorboard")
    assert writer.scalars == {
        ("task 1/train_loss", 2): 0.5,
        ("task 1/lr", 2): 0.1,
        ("mean test accuracy", 2): 70.0,
        ("test accuracy/task 1", 2): 80.0,
        ("test accuracy/task 2", 2): 60.0,
    }
    assert writer.flushed == 2


@pytest.mark.usefixtures("_installed")
def test_so_do_updates_and_evaluations_of_games(tmp_path: Path) -> None:
    (watch,) = tensorboard.make_tensorboard_callbacks(tmp_path)
    (writer,) = written
    losses = {"policy_loss": -0.1, "clip_fraction": 0.25, "explained_variance": None}
    watch("update", {"task": 1, "update": 3, "step": 300, "games": 2, "score": None, "lr": 0.1, "seconds": {}} | losses)
    watch("evaluation", {"task": 1, "step": 200, "scores": [7.0, 2.0], "normalised": [1.0, 0.25], "accumulated": 1.25})
    learned = {"free": {"fc": 0.5}, "bytes": {"network": 8}}
    watch(
        "game", {"task": 1, "step": 400, "scores": [6.0, 9.0], "normalised": [0.5, None], "accumulated": None} | learned
    )
    assert writer.scalars == {
        **{("game 2/games", 300): 2, ("game 2/lr", 300): 0.1, ("game 2/policy_loss", 300): -0.1},
        **{("game 2/clip_fraction", 300): 0.25},
        **{("score/game 1", 200): 7.0, ("score/game 2", 200): 2.0, ("accumulated normalised reward", 200): 1.25},
        **{("normalised score/game 1", 200): 1.0, ("normalised score/game 2", 200): 0.25},
        **{("score/game 1", 400): 6.0, ("score/game 2", 400): 9.0, ("normalised score/game 1", 400): 0.5},
        **{("free/fc", 400): 0.5, ("bytes/network", 400): 8},
    }


@pytest.mark.usefixtures("_installed")
def test_only_errors_of_its_own_threads_are_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: printed.append(type(arguments.thread).__name__))
    for _ in range(2):
        tensorboard.make_tensorboard_callbacks(tmp_path)

    class _AsyncWriterThread(threading.Thread):
        def run(self) -> None:
            raise OSError("no space left on device")

    class OtherThread(_AsyncWriterThread):
        pass

    for kind in (_AsyncWriterThread, OtherThread):
        thread = kind()
        thread.start()
        thread.join()
    assert printed == ["OtherThread"]
