"""Training state of a task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sgp.experiments.averaging import WeightAverage
from sgp.experiments.folder import RunError
from sgp.experiments.optimizers import get_optimizer_state, restore_optimizer_state
from sgp.experiments.schedules import Schedule


class TaskState:
    """Training state of the task that is being learned: everything that a run needs to resume inside the task.

    Args:
        network: Network that the optimizer trains.
        optimizer: Optimizer of the task.
        schedule: Learning rate and end of the task.
        average: Average of the weights, if the task ends with it.

    Attributes:
        earlier_logits: Logits of earlier tasks' heads for the task's examples before training, [n, classes], if heads
            are realigned after the task.
    """

    def __init__(
        self, network: nn.Module, optimizer: Optimizer, schedule: Schedule, average: WeightAverage | None
    ) -> None:
        self._network = network
        self.optimizer = optimizer
        self.schedule = schedule
        self.average = average
        self.earlier_logits: Tensor | None = None
        self._best: dict[str, Tensor] | None = None

    def observe(self, validation_loss: float | None) -> None:
        """End an epoch: advance the schedule, and store the weights if they are the best ones so far."""
        if self.schedule.observe(validation_loss):
            self._best = {name: tensor.clone() for name, tensor in self._network.state_dict().items()}

    @contextmanager
    def use_average(self) -> Iterator[None]:
        """Evaluate the network with the averaged weights inside the context, if the task ends with them."""
        with self.average.use() if self.average else nullcontext():
            yield

    def finalize_weights(self) -> None:
        """Give the network the weights that the task ends with: averaged, best or last ones."""
        if self.average is not None:
            self.average.copy_to_network()
        elif self._best is not None:
            self._network.load_state_dict(self._best)

    def save(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Return the state for a checkpoint: plain values, and parts with tensors."""
        parts: dict[str, dict[str, Any]] = {}
        if self.optimizer.state:
            parts["optimizer"] = get_optimizer_state(self.optimizer)
        if self._best is not None:
            parts["best"] = self._best
        if self.earlier_logits is not None:
            parts["answers"] = {"logits": self.earlier_logits}
        if self.average is not None:
            parts |= self.average.state_dict()
        return {"schedule": self.schedule.state_dict()}, parts

    def load(self, progress: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
        """Restore what `save` returned.

        Raises:
            RunError: The checkpoint lacks a part.
        """
        self.schedule.load_state_dict(progress["schedule"])
        restore_optimizer_state(self.optimizer, parts.get("optimizer", {}))
        self._best = parts.get("best")
        self.earlier_logits = parts["answers"]["logits"] if "answers" in parts else None
        if self.average is not None:
            try:
                self.average.load_state_dict(parts)
            except KeyError as error:
                raise RunError(
                    f"the checkpoint has no part {error}, so another version of sgp wrote it: "
                    "start again under another --name"
                ) from error
