"""Events for TensorBoard, where that is installed; those of games too, since names tell them apart."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sgp.training.recorded import Watcher


def tensorboard_watcher(folder: Path) -> list[Watcher]:
    """One watcher that writes events beside a run's metrics; none without TensorBoard."""
    if find_spec("tensorboard") is None:
        return []
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))

    def watch(event: str, values: dict[str, Any]) -> None:
        if event == "epoch":
            for name in ("train_loss", "validation_loss", "validation_accuracy", "lr"):
                if values[name] is not None:
                    writer.add_scalar(f"task {values['task'] + 1}/{name}", values[name], values["epoch"])
        elif event == "task":
            row = values["accuracies"]
            writer.add_scalar("mean test accuracy", sum(row) / len(row), values["task"] + 1)
            for task, accuracy in enumerate(row):
                writer.add_scalar(f"test accuracy/task {task + 1}", accuracy, values["task"] + 1)
        elif event == "update":
            for name in ("score", "lr", "policy_loss", "value_loss", "entropy", "kl", "explained_variance"):
                if values[name] is not None:
                    writer.add_scalar(f"game {values['task'] + 1}/{name}", values[name], values["step"])
        elif event in ("evaluation", "game"):
            for task, score in enumerate(values["scores"]):
                writer.add_scalar(f"score/game {task + 1}", score, values["step"])
            if values["accumulated"] is not None:
                writer.add_scalar("accumulated normalised reward", values["accumulated"], values["step"])
        writer.flush()

    return [watch]
