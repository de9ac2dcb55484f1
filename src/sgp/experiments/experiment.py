"""Base class of the trainers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from sgp.experiments.allocator import keep_freed_memory
from sgp.experiments.callbacks import Callback
from sgp.experiments.config import Config
from sgp.experiments.device import get_device, move_tensors, use_precision
from sgp.experiments.folder import RunFolder
from sgp.experiments.seeds import derive_seed
from sgp.methods import Batch, Method


class Experiment(ABC):
    """Base class of the trainers: learn tasks one after another, log events, write checkpoints and resume from them.

    Everything random is drawn from seeds that depend on the run's seed, its use, the task and the epoch alone. So a
    checkpoint needs no random state, and an additional evaluation changes nothing.

    Args:
        config: Config of the run.
        stream: Tasks of the run.
        network: Network to train.
        method: Method that trains it.
        folder: Folder that the run writes to. If it has a checkpoint, the run resumes from it.
        callbacks: Functions that are called for every event.

    Attributes:
        device: Device of the network.
    """

    def __init__(
        self,
        config: Config[Any],
        stream: Sized,
        network: nn.Module,
        method: Method[Any],
        folder: RunFolder,
        *callbacks: Callback,
    ) -> None:
        self.config = config
        self.stream = stream
        self.network = network
        self.method = method
        self.folder = folder
        self.callbacks = callbacks
        self.device = get_device(network)
        self._precision = use_precision(config, self.device)
        self._seconds: dict[str, float] = defaultdict(float)

    def run(self) -> None:
        """Learn all tasks that are not learned yet, with the config's precision and number of threads."""
        keep_freed_memory()
        threads = torch.get_num_threads()
        torch.set_num_threads(self.config.threads or threads)
        try:
            with self._precision:
                self._run()
        finally:
            torch.set_num_threads(threads)

    def _run(self) -> None:
        progress, parts = self.folder.load() or ({"task": 0}, {})
        # The optimizer puts its own state on the right device.
        parts = {name: part if name == "optimizer" else move_tensors(part, self.device) for name, part in parts.items()}
        if parts:
            # The method comes first: it may have to grow the network before the weights fit.
            self.method.load_state_dict(parts["method"])
            self.method.trained_module.load_state_dict(parts["network"])
            self._restore(progress, parts)
        position = progress["task"]
        while position < len(self.stream):
            position, progress, parts = self._learn(position, progress, parts), {}, {}
        self._log("end", **self._summarize())

    @abstractmethod
    def _learn(self, position: int, progress: Mapping[str, Any], parts: Mapping[str, Any]) -> int:
        """Learn the next task, and return the position after it.

        Args:
            position: Position of the task in the stream.
            progress: Plain values of a checkpoint inside the task; empty at the start of the task.
            parts: Parts of the same checkpoint that contain tensors.
        """

    def _restore(self, progress: Mapping[str, Any], parts: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore the state that a trainer saves in addition to the network and the method."""

    def _summarize(self) -> dict[str, Any]:
        """Return the values of the event that ends the run."""
        return {}

    def _save(self, position: int, progress: Mapping[str, Any], parts: Mapping[str, dict[str, Any]]) -> None:
        """Write a checkpoint.

        Args:
            position: Position of the task that the run resumes with.
            progress: Plain values to save in addition to the position.
            parts: Parts with tensors to save in addition to the network and the method.
        """
        own: dict[str, dict[str, Any]] = {
            "network": self.method.trained_module.state_dict(),
            "method": self.method.state_dict(),
        }
        self.folder.save({"task": position} | dict(progress), own | dict(parts))

    def _compute_log_likelihood(self, head: int) -> Callable[[Batch], torch.Tensor]:
        """Return the function for a method's `consolidate` that computes the log-likelihood of each example's label."""

        def log_likelihood(batch: Batch) -> torch.Tensor:
            inputs, labels = batch
            with self._use_statistics(head):
                return -F.cross_entropy(self.method.compute_logits(inputs, head), labels, reduction="none")

        return log_likelihood

    def _use_statistics(self, head: int) -> AbstractContextManager[None]:
        """Return a context in which BatchNorm has the statistics of a task, if the task has its own."""
        return nullcontext()

    def _measure_bytes(self) -> dict[str, int]:
        """Return the memory of the network and the method in bytes, by use."""
        return {"network": sum(parameter.nbytes for parameter in self.network.parameters())} | self.method.count_bytes()

    def _log(self, event: str, **values: Any) -> None:
        """Write an event with the seconds of each phase since the last event, and call the callbacks."""
        if self._seconds:
            values["seconds"] = {phase: round(seconds, 4) for phase, seconds in self._seconds.items()}
            self._seconds.clear()
        self.folder.log(event, **values)
        for callback in self.callbacks:
            callback(event, values)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Add the wall time of the context to a phase."""
        start = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - start

    @contextmanager
    def _seeded(self, use: str, *position: int) -> Iterator[None]:
        """Seed the global generators of torch and numpy inside the context, and restore their state afterwards."""
        seed, numpy_state = derive_seed(self.config.seed, use, *position), np.random.get_state()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            try:
                yield
            finally:
                np.random.set_state(numpy_state)
