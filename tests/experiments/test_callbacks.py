"""Callbacks: plain lines without a terminal, a live line at one, and events for TensorBoard where it is installed."""

import io
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("yaml", reason="the settings come from YAML files; of the extra 'benchmarks'")

from sgp.experiments import callbacks
from sgp.experiments.callbacks import Display, format_duration
from sgp.experiments.config import configure

CONFIG = configure("digits", "sgp", epochs=4)


def epoch(task: int, number: int, accuracy: float | None = 91.25) -> dict[str, Any]:
    return {"task": task, "epoch": number, "train_loss": 0.51234, "lr": 0.05, "validation_accuracy": accuracy}


def row(task: int, name: str = "a [b] task") -> dict[str, Any]:
    return {"task": task, "name": name, "accuracies": [90.0] * task + [80.0]}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock by seconds that a test sets."""
    now = [1000.0]
    monkeypatch.setattr("sgp.experiments.callbacks.time.monotonic", lambda: now[0])
    return now


def test_without_a_terminal_there_are_plain_lines(clock: list[float]) -> None:
    text = io.StringIO()
    with Display(Console(file=text, width=80), CONFIG, ["one", "two"]) as display:
        clock[0] += 10
        display("epoch", epoch(0, 1))
        clock[0] += 30
        display("task", row(0))
        display("epoch", epoch(1, 1, None))
        display("task", row(1))
        display("end", {"acc": 1.0})
    assert text.getvalue().splitlines() == [
        "task 1/2 epoch 1/4: loss 0.512, validation 91.2 %, lr 0.05, 1 min 10 s left",
        "task 1/2 a [b] task: 80.0 %; all so far 80.0 % (40 s)",
        "task 2/2 epoch 1/4: loss 0.512, lr 0.05, 0 s left",
        "task 2/2 a [b] task: 80.0 %; all so far 85.0 % (0 s)",
    ]


def test_at_a_terminal_there_is_a_live_line_and_one_for_each_task() -> None:
    text = io.StringIO()
    console = Console(file=text, width=120, force_terminal=True, color_system=None, legacy_windows=False)
    with Display(console, CONFIG, ["one", "two"]) as display:
        display("epoch", epoch(0, 1))
        display("task", row(0))
        display("epoch", epoch(1, 1))
    output = text.getvalue()
    assert "\x1b[" in output  # the line is drawn over
    assert "task 1/2 a [b] task: 80.0 %" in output
    assert "task 2/2, epoch 1" in output
    assert "loss 0.512, val 91.2 %, lr 0.05" in output


def test_a_live_line_is_whole_at_eighty_columns(clock: list[float]) -> None:
    text = io.StringIO()
    console = Console(file=text, width=80, force_terminal=True, color_system=None, legacy_windows=False)
    with Display(console, configure("split-cifar100", "sgp"), ["a task"] * 10) as display:
        clock[0] += 2500
        display("epoch", epoch(9, 187, 100.0) | {"train_loss": 12.3456, "lr": 0.05 / 2**7})
        display._progress.refresh()
    assert "task 10/10, epoch 187 " in text.getvalue()
    assert "loss 12.346, val 100.0 %, lr 0.00039, 9 h 01 min left" in text.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True], ids=["lines", "bar"])
def test_updates_of_games_are_a_live_line_and_evaluations_stay(clock: list[float], is_terminal: bool) -> None:
    text = io.StringIO()
    console = Console(file=text, width=100, force_terminal=is_terminal, color_system=None, legacy_windows=False)
    update = {"task": 0, "update": 1, "score": 1.25, "entropy": 0.5}
    evaluation = {"task": 0, "update": 2, "scores": [3.0], "accumulated": None}
    with Display(console, configure("minatar", "sgp", steps=2 * 2048), ["one", "two"]) as display:
        display("evaluation", evaluation | {"update": 0})
        clock[0] += 10
        display("update", update)
        display._progress.refresh()
        display("game", evaluation)
        clock[0] += 20
        display("update", update | {"task": 1})
        display("evaluation", {"task": 1, "update": 1, "scores": [3.0, 4.0], "accumulated": 1.5})
    output = text.getvalue()
    assert ("game 1/2" in output and "score 1.2, entropy 0.50, 30 s left" in output) == is_terminal
    lines = [line for line in output.splitlines() if "updates: " in line]
    assert [line[line.index("game") :].rstrip() for line in lines] == [
        "game 1/2 after 0/2 updates: one 3.0",
        "game 1/2 after 2/2 updates: one 3.0, 10 s left",
        "game 2/2 after 1/2 updates: one 3.0, two 4.0; reward 1.50, 20 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (9000, "2 h 30 min"),
    ],
)
def test_time_is_told_in_words(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


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
    monkeypatch.setattr(callbacks, "find_spec", lambda name: None)
    assert callbacks.make_tensorboard_callbacks(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setattr(callbacks, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    written.clear()


@pytest.mark.usefixtures("_installed")
def test_with_it_epochs_and_tasks_become_scalars(tmp_path: Path) -> None:
    (watch,) = callbacks.make_tensorboard_callbacks(tmp_path)
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
    (watch,) = callbacks.make_tensorboard_callbacks(tmp_path)
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
        callbacks.make_tensorboard_callbacks(tmp_path)

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
