"""Learn a stream of tasks one after another, in a way that can be stopped at any moment and taken up again.

Everything random is drawn from seeds that depend on the run's seed, the task and the epoch alone. So a checkpoint needs
no random state, and an evaluation more or less changes nothing.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from sgp.benchmarks.metrics import acc, bwt
from sgp.benchmarks.stream import Examples, Stream, Task
from sgp.methods import METHODS, Batch
from sgp.networks import NETWORKS
from sgp.runs.config import Config
from sgp.runs.folder import RunError, RunFolder
from sgp.runs.summary import accuracy_matrix, write_tables
from sgp.training.average import WeightAverage
from sgp.training.evaluate import Score, batches, evaluate
from sgp.training.schedule import SCHEDULES, Schedule
from sgp.training.seeds import generator_for, seed_for
from sgp.training.statistics import estimate_statistics

EMPTY: Mapping[str, Any] = {}
# Means and variances of maps over as many examples are exact enough; all of them would cost a third of an epoch.
STATISTICS_EXAMPLES = 1024


class Watcher(Protocol):
    """Is told of every event of a run, as it is written to the metrics."""

    def __call__(self, event: str, values: dict[str, Any]) -> None: ...


class Learner:
    """One run: a network, a method and how far they are.

    Args:
        config: of the run.
        stream: its tasks.
        folder: where it leaves its traces; with a checkpoint there, the run goes on from it.
        watchers: are told of every event.
    """

    def __init__(self, config: Config, stream: Stream, folder: RunFolder, *watchers: Watcher) -> None:
        self.config = config
        self.stream = stream
        self.folder = folder
        self.watchers = watchers
        self.network = build_network(config, stream)
        # Heads belong to single tasks and need no protection, unless all tasks share one.
        exclude = ["heads.*"] if len(stream.heads) > 1 else []
        self.method = METHODS[config.method](self.network, config.settings, exclude=exclude)
        self.accuracies: list[list[float]] = []
        self._seconds: dict[str, float] = defaultdict(float)

    def run(self) -> None:
        """Learn what is left to learn."""
        progress, parts = self.folder.load() or ({"task": 0, "accuracies": []}, {})
        self.accuracies = progress["accuracies"]
        if parts:
            self.network.load_state_dict(parts["network"])
            self.method.load_state_dict(parts["method"])
        # The user's own random state is not ours to advance.
        with torch.random.fork_rng(devices=[]):
            for position in range(progress["task"], len(self.stream)):
                task = self.task(position)
                self.learn(position, task, progress, parts)
                self._finish(position, task)
                progress, parts = {}, {}
        matrix = accuracy_matrix(self.accuracies)
        self._log("end", acc=acc(matrix), bwt=bwt(matrix) if len(matrix) > 1 else None)

    def learn(
        self, position: int, task: Task, progress: Mapping[str, Any] = EMPTY, parts: Mapping[str, Any] = EMPTY
    ) -> None:
        """Train on one task.

        Args:
            position: of the task in the stream.
            task: itself.
            progress: of a checkpoint inside the task; empty to begin it.
            parts: of the same checkpoint.
        """
        training = self.config.training
        if training.schedule == "patience" and len(task.validation) == 0:
            raise RunError(
                f"task {position + 1} ({task.name}) has no validation examples, which schedule=patience needs: "
                "try a larger --validation"
            )
        optimizer = SGD(self.network.parameters(), lr=training.lr)
        self.method.attach(optimizer)
        schedule = SCHEDULES[training.schedule](training)
        average = WeightAverage(self.network, training.average) if training.average else None
        best: dict[str, Tensor] | None = None
        if "schedule" in progress:
            schedule.load_state_dict(progress["schedule"])
            if average:
                average.load_state_dict(parts["average"])
            best = parts.get("best")

        while not schedule.done:
            with self._timed("train"):
                loss = self._epoch(position, task, optimizer, schedule, average)
            with self._timed("validate"), average.applied() if average else nullcontext():
                self._estimate_statistics(position, task)
                score = self._score(task.validation, task, "validation")
            lr = schedule.rate(0.0)
            if not math.isfinite(loss) or not math.isfinite(score.loss or 0.0):
                raise RunError(
                    f"the loss of task {position + 1} ({task.name}) is no number after epoch {schedule.epochs + 1}: "
                    f"try a lower --lr than {training.lr:g}"
                )
            if schedule.observe(score.loss):
                best = {name: tensor.clone() for name, tensor in self.network.state_dict().items()}
            self._log(
                "epoch",
                task=position,
                epoch=schedule.epochs,
                lr=lr,
                train_loss=loss,
                validation_loss=score.loss,
                validation_accuracy=score.accuracy,
            )
            with self._timed("checkpoint"):
                self._save(position, schedule=schedule, best=best, average=average)

        if average is not None:
            average.keep()
            self._estimate_statistics(position, task)
        elif best is not None:
            self.network.load_state_dict(best)

    def _epoch(
        self, position: int, task: Task, optimizer: SGD, schedule: Schedule, average: WeightAverage | None
    ) -> float:
        """One pass over the training data; the mean loss."""
        seed = self.config.seed
        order = torch.randperm(len(task.train), generator=generator_for(seed, "order", position, schedule.epochs))
        torch.manual_seed(seed_for(seed, "dropout", position, schedule.epochs))
        self.network.train()
        total, seen = 0.0, 0
        for rows in batches(order, self.config.training.batch):
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(seen / len(order))
            optimizer.zero_grad()
            loss = F.cross_entropy(self.network(task.train.inputs[rows], task.head), task.train.labels[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if average is not None:
                average.update()
            total += loss.item() * len(rows)
            seen += len(rows)
        return total / seen

    def _estimate_statistics(self, position: int, task: Task) -> None:
        """Bring stored statistics of BatchNorm in line with the weights, unless the method keeps them for old tasks."""
        if not self.method.keeps_statistics:
            order = torch.randperm(len(task.train), generator=generator_for(self.config.seed, "statistics", position))
            rows = batches(order[:STATISTICS_EXAMPLES], self.config.training.batch)
            estimate_statistics(self.network, (task.train.inputs[each] for each in rows), task.head)

    def _finish(self, position: int, task: Task) -> None:
        """Let the method take the task in, and test all tasks learned so far."""
        with self._timed("consolidate"):
            size = self.method.consolidation_batch or self.config.training.batch
            order = torch.randperm(len(task.train), generator=generator_for(self.config.seed, "consolidate", position))
            self.method.consolidate(_Batches(task.train, order, size), self._log_likelihood(task))
        with self._timed("test"):
            # One after another: the floats of all tasks at once may not fit in memory.
            seen = (self.stream[each] for each in range(position + 1))
            scores = [self._score(self._laid_out(each.test), each, "test").accuracy for each in seen]
        row = [accuracy for accuracy in scores if accuracy is not None]
        self.accuracies = [*self.accuracies, row]
        self._log(
            "task",
            task=position,
            name=task.name,
            accuracies=row,
            free=self.method.free(),
            capacity=self.method.capacity(),
            bytes={"network": sum(p.nbytes for p in self.network.parameters())} | self.method.bytes(),
        )
        # Before the checkpoint, after which a resumed run does not come back here.
        write_tables(self.folder)
        self._save(position + 1)

    def task(self, position: int) -> Task:
        """A task of the stream, cut down and laid out in memory as the config says."""
        task = self.stream[position]
        train, validation, test = map(self._laid_out, (task.train, task.validation, task.test))
        return replace(task, train=train, validation=validation, test=test)

    def _laid_out(self, examples: Examples) -> Examples:
        if self.config.samples is not None:
            # Drawn, since the files of some data sets are in the order of their classes.
            order = torch.randperm(len(examples), generator=generator_for(self.config.seed, "samples"))
            examples = examples[order[: self.config.samples]]
        if not self.config.channels_last or examples.inputs.dim() != 4:
            return examples
        return Examples(examples.inputs.contiguous(memory_format=torch.channels_last), examples.labels)

    def _score(self, examples: Examples, task: Task, use: str) -> Score:
        order = torch.randperm(len(examples), generator=generator_for(self.config.seed, use, task.head))
        return evaluate(self.network, examples, task.head, batch=self.config.training.test_batch, order=order)

    def _log_likelihood(self, task: Task) -> Callable[[Batch], Tensor]:
        def log_likelihood(batch: Batch) -> Tensor:
            inputs, labels = batch
            return -F.cross_entropy(self.network(inputs, task.head), labels, reduction="none")

        return log_likelihood

    def _save(
        self,
        position: int,
        *,
        schedule: Schedule | None = None,
        best: dict[str, Tensor] | None = None,
        average: WeightAverage | None = None,
    ) -> None:
        """Write a checkpoint: at the start of a task, or with a schedule inside it."""
        progress: dict[str, Any] = {"task": position, "accuracies": self.accuracies}
        parts: dict[str, dict[str, Any]] = {"network": self.network.state_dict(), "method": self.method.state_dict()}
        if schedule is not None:
            progress["schedule"] = schedule.state_dict()
        if best is not None:
            parts["best"] = best
        if average is not None:
            parts["average"] = average.state_dict()
        self.folder.save(progress, parts)

    def _log(self, event: str, **values: Any) -> None:
        """Write an event, with the seconds that each phase has taken since the last one."""
        if self._seconds:
            values["seconds"] = {phase: round(seconds, 4) for phase, seconds in self._seconds.items()}
            self._seconds.clear()
        self.folder.log(event, **values)
        for watcher in self.watchers:
            watcher(event, values)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - start


@dataclass(frozen=True)
class _Batches:
    """Examples in an order, in lots of a size, as often as they are asked for."""

    examples: Examples
    order: Tensor
    size: int

    def __iter__(self) -> Iterator[Batch]:
        for rows in batches(self.order, self.size):
            yield self.examples.inputs[rows], self.examples.labels[rows]


def build_network(config: Config, stream: Stream) -> nn.Module:
    """The config's network for a stream, with the seed's weights."""
    kind = NETWORKS[config.network]
    offered = {"statistics": config.statistics, "bias": config.network_bias}
    options = {name: value for name, value in offered.items() if name in kind.options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(config.seed, "weights"))
        network = kind.build(stream.inputs, stream.heads, **options)
    if config.channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network
