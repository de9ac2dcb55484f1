"""TensorBoard, where it is installed."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sgp.experiments.experiment import Callback


def make_tensorboard_callbacks(folder: Path) -> list[Callback]:
    """Return a callback that writes events for TensorBoard beside a run's metrics, or none if it is not installed."""
    if find_spec("tensorboard") is None:
        return []
    from torch.utils.tensorboard import SummaryWriter

    _silence_writer_threads()
    writer = SummaryWriter(str(folder / "tensorboard"))

    def add(name: str, value: float | None, step: int) -> None:
        if value is not None:
            writer.add_scalar(name, value, step)

    def write_event(event: str, values: dict[str, Any]) -> None:
        if event == "epoch":
            for name in ("train_loss", "validation_loss", "validation_accuracy", "lr"):
                add(f"task {values['task'] + 1}/{name}", values[name], values["epoch"])
        elif event == "task":
            row = values["accuracies"]
            add("mean test accuracy", sum(row) / len(row), values["task"] + 1)
            for task, accuracy in enumerate(row):
                add(f"test accuracy/task {task + 1}", accuracy, values["task"] + 1)
        elif event == "update":
            for name in values.keys() - {"task", "update", "step", "seconds"}:
                add(f"game {values['task'] + 1}/{name}", values[name], values["step"])
        elif event in ("evaluation", "game"):
            step = values["step"]
            for task, (score, normalised) in enumerate(zip(values["scores"], values["normalised"], strict=True)):
                add(f"score/game {task + 1}", score, step)
                add(f"normalised score/game {task + 1}", normalised, step)
            add("accumulated normalised reward", values["accumulated"], step)
            for layer, free in values.get("free", {}).items():
                add(f"free/{layer}", free, step)
            for use, size in values.get("bytes", {}).items():
                add(f"bytes/{use}", size, step)
        writer.flush()

    return [write_event]


def _silence_writer_threads() -> None:
    """Stop the threads of TensorBoard from printing their errors, which the writer raises again at the next event."""
    report = threading.excepthook
    if getattr(report, "is_silent", False):
        return

    def report_others(arguments: threading.ExceptHookArgs) -> None:
        if type(arguments.thread).__name__ != "_AsyncWriterThread":
            report(arguments)

    report_others.is_silent = True  # type: ignore[attr-defined]
    threading.excepthook = report_others
