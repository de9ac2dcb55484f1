"""Supervised training on a stream of tasks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sgp.benchmarks.metrics import acc, bwt
from sgp.benchmarks.stream import Examples, Stream, Task
from sgp.experiments.averaging import WeightAverage
from sgp.experiments.callbacks import Callback
from sgp.experiments.config import Config, SupervisedSettings
from sgp.experiments.evaluation import Score, average_scores, evaluate, split_rows
from sgp.experiments.experiment import Experiment
from sgp.experiments.folder import RunError, RunFolder
from sgp.experiments.networks import build_network, check_trained_heads
from sgp.experiments.norm_policy import NormPolicy
from sgp.experiments.optimizers import OPTIMIZERS, separate_heads, set_lr
from sgp.experiments.realign import compute_logits, realign
from sgp.experiments.schedules import make_schedule
from sgp.experiments.seeds import make_generator
from sgp.experiments.summary import build_accuracy_matrix, write_tables
from sgp.experiments.task_state import TaskState
from sgp.methods import METHODS, Batch, Method, Moment

# So many examples make means and variances of feature maps precise enough; all of them would take a third of an epoch.
STATISTICS_EXAMPLES = 1024


class SupervisedTrainer(Experiment):
    """Train a network on a stream of supervised tasks, one after another or jointly as the method asks.

    Args:
        config: Config of the run.
        stream: Tasks of the run.
        folder: Folder that the run writes to. If it has a checkpoint, the run resumes from it.
        callbacks: Functions that are called for every event.

    Raises:
        ValueError: The config's network, method and trainer do not fit together.
    """

    config: Config[SupervisedSettings]
    stream: Stream

    def __init__(
        self, config: Config[SupervisedSettings], stream: Stream, folder: RunFolder, *callbacks: Callback
    ) -> None:
        network = build_network(config, stream)
        self._has_shared_head = len(stream.heads) == 1
        # Heads belong to single tasks and need no protection, unless all tasks share one.
        self._own_heads = [] if self._has_shared_head else ["heads.*"]
        try:
            method: Method[Any] = METHODS[config.method](network, config.method_settings, exclude=self._own_heads)
        except TypeError as error:  # a layer type that the method does not support
            raise ValueError(f"{config.method} does not support the network {config.network}: {error}") from error
        if config.trainer.head_lr is not None:
            check_trained_heads(network, method.trained_module)
        super().__init__(config, stream, network, method, folder, *callbacks)
        self.norms = NormPolicy(
            method, mixed=config.trainer.norm_statistics == "mixed", has_shared_head=self._has_shared_head
        )
        self.accuracies: list[list[float]] = []

    def _restore(self, progress: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
        self.accuracies = progress["accuracies"]
        self.norms.load_state_dict(parts.get("statistics", {}))

    def _summarize(self) -> dict[str, Any]:
        matrix = build_accuracy_matrix(self.accuracies)
        return {"acc": acc(matrix), "bwt": bwt(matrix) if len(matrix) > 1 else None}

    def _learn(self, position: int, progress: Mapping[str, Any], parts: Mapping[str, Any]) -> int:
        count = len(self.stream) if self.method.trains_jointly else 1
        tasks = [self.load_task(each) for each in range(position, position + count)]
        self.train(position, tasks, progress, parts)
        self._finish_tasks(position, tasks)
        return position + count

    # One task, from its first epoch to its last

    def train(
        self,
        position: int,
        tasks: Sequence[Task],
        progress: Mapping[str, Any] | None = None,
        parts: Mapping[str, Any] | None = None,
    ) -> None:
        """Train on one task, or on several jointly.

        Args:
            position: Position of the first task in the stream.
            tasks: Tasks to train on.
            progress: Plain values of a checkpoint inside the task; None at its start.
            parts: Parts with tensors of the same checkpoint.
        """
        self._check_validation(position, tasks)
        if progress and "schedule" in progress:
            state = self._begin_training(position)
            state.load(progress, parts or {})
        else:
            self._begin_tasks(position, tasks)
            state = self._begin_training(position)
            state.earlier_logits = self._compute_earlier_logits(position, tasks[0])
        while not state.schedule.done:
            with self._timed("train"):
                loss = self._train_epoch(position, tasks, state)
                self.method.finalize_weights()
            with self._timed("validate"), state.use_average():
                score = self._validate(position, tasks, state.schedule.epochs)
            self._end_epoch(position, tasks, state, loss, score)
            with self._timed("checkpoint"):
                self._save_checkpoint(position, state)
        state.finalize_weights()
        if state.earlier_logits is not None:
            with self._timed("realign"):
                inputs = self._iterate_inputs(position, tasks[0])
                realign(self.network, range(position), state.earlier_logits, inputs, tasks[0].head)
        self._estimate_norm_statistics(position, tasks)

    def _check_validation(self, position: int, tasks: Sequence[Task]) -> None:
        if self.config.trainer.schedule != "patience":
            return
        for number, task in enumerate(tasks, start=position + 1):
            if len(task.validation) == 0:
                raise RunError(
                    f"task {number} ({task.name}) has no validation examples, which schedule=patience needs: "
                    "try a larger --validation"
                )

    def _begin_tasks(self, position: int, tasks: Sequence[Task]) -> None:
        """Let a supervised method prepare for tasks that it has not begun."""
        if not self.method.supervised_only:
            return
        with self._timed("begin"), self._seeded("begin", position), self._explain_refusal():
            for task in tasks:
                batches = self._iterate_batches(task, self.config.trainer.batch, "begin", position)
                self.method.begin_task(task.head, batches)

    def _begin_training(self, position: int) -> TaskState:
        """Create the optimizer, schedule and average of a task, and attach the method to the optimizer."""
        trainer = self.config.trainer
        with self._explain_refusal():
            optimizer = self.method.build_optimizer(OPTIMIZERS[trainer.optimizer], trainer.lr)
        if trainer.head_lr is not None:
            separate_heads(optimizer, self.network, trainer.head_lr / trainer.lr)
        self.method.attach(optimizer)
        trained, average = self.method.trained_module, None
        if trainer.average:
            # The first task has no earlier weights to interpolate with.
            share = trainer.interpolation_weight if position else 0.0
            average = WeightAverage(trained, trainer.average, interpolation_weight=share, new=self._own_heads)
        return TaskState(trained, optimizer, make_schedule(trainer), average)

    @contextmanager
    def _explain_refusal(self) -> Iterator[None]:
        """Name the method and the network where the method refuses a layer or a way of training."""
        try:
            yield
        except (TypeError, ValueError) as error:
            raise RunError(f"{self.config.method} cannot train {self.config.network} this way: {error}") from error

    def _compute_earlier_logits(self, position: int, task: Task) -> Tensor | None:
        """Compute the logits of earlier tasks' heads for a task's examples, if the heads are realigned after it."""
        if not (self.config.trainer.realign and position > 0 and self._own_heads):
            return None
        with self._timed("realign"):
            return compute_logits(self.network, range(position), self._iterate_inputs(position, task), task.head)

    def _train_epoch(self, position: int, tasks: Sequence[Task], state: TaskState) -> float:
        """Pass over the training data once, and return the mean loss."""
        epoch, optimizer = state.schedule.epochs, state.optimizer
        count, total, seen = sum(len(task.train) for task in tasks), 0.0, 0
        self.network.train()
        with self._seeded("dropout", position, epoch):
            for task, rows in self._shuffle_batches(position, tasks, epoch):
                share = seen / count
                set_lr(optimizer, state.schedule.get_lr(share))
                moment = Moment(epoch, share, (epoch + share) / self.config.trainer.epochs)
                batch = task.train.inputs[rows], task.train.labels[rows]
                loss = self.method.step(batch, task.head, moment, optimizer)
                if state.average is not None:
                    state.average.update()
                total += loss * len(rows)
                seen += len(rows)
        return total / seen

    def _shuffle_batches(self, position: int, tasks: Sequence[Task], epoch: int) -> Iterator[tuple[Task, Tensor]]:
        """Yield the task and the rows of each batch of an epoch; batches of several tasks come in random order."""
        seed, found = self.config.seed, []
        for offset, task in enumerate(tasks):
            order = torch.randperm(len(task.train), generator=make_generator(seed, "order", position + offset, epoch))
            found += [(task, rows) for rows in split_rows(order, self.config.trainer.batch)]
        if len(tasks) > 1:
            turns = torch.randperm(len(found), generator=make_generator(seed, "turns", position, epoch))
            found = [found[turn] for turn in turns.tolist()]
        yield from found

    def _validate(self, position: int, tasks: Sequence[Task], epoch: int) -> Score:
        """Evaluate the tasks that are being learned on their validation data."""
        if any(len(task.validation) for task in tasks):  # otherwise nothing reads the statistics before the task ends
            self._estimate_norm_statistics(position, tasks)
        return average_scores([self._evaluate(task.validation, task, "validation", epoch) for task in tasks])

    def _end_epoch(self, position: int, tasks: Sequence[Task], state: TaskState, loss: float, score: Score) -> None:
        """Check the losses, advance the schedule, and log the epoch."""
        lr, epoch = state.schedule.get_lr(0.0), state.schedule.epochs + 1
        for name, value in (("loss", loss), ("validation loss", score.loss or 0.0)):
            if not math.isfinite(value):
                raise RunError(
                    f"{name} became {'NaN' if math.isnan(value) else 'infinite'} in task {position + 1} "
                    f"({tasks[0].name}), epoch {epoch}; try a lower --lr than {self.config.trainer.lr:g}"
                )
        state.observe(score.loss)
        self._log(
            "epoch",
            task=position,
            epoch=epoch,
            lr=lr,
            train_loss=loss,
            validation_loss=score.loss,
            validation_accuracy=score.accuracy,
        )

    def _estimate_norm_statistics(self, position: int, tasks: Sequence[Task]) -> None:
        """Estimate stored BatchNorm statistics for the weights as they are, unless the method owns them."""
        if self.norms.is_estimated:
            with self._seeded("statistics", position):
                self.norms.estimate(tasks[0].head, self._iterate_passes(position, tasks))

    def _save_checkpoint(self, position: int, state: TaskState | None = None) -> None:
        """Write a checkpoint: inside a task, or without a state between two tasks."""
        progress, parts = state.save() if state is not None else ({}, {})
        if statistics := self.norms.state_dict():
            parts["statistics"] = statistics
        self._save(position, {"accuracies": self.accuracies} | progress, parts)

    # After a task

    def _finish_tasks(self, position: int, tasks: Sequence[Task]) -> None:
        """Consolidate the tasks that were learned, and evaluate all tasks so far."""
        with self._timed("consolidate"), self._seeded("consolidate", position):
            for task in tasks:
                self.consolidate(position, task)
        learned = position + len(tasks)
        with self._timed("test"):
            row = self._test_tasks(learned)
        # Tasks that were learned jointly get a row each, as if nothing had been learned after them.
        for each in range(position, learned):
            self.accuracies = [*self.accuracies, row[: each + 1]]
            self._log(
                "task",
                task=each,
                name=tasks[each - position].name,
                accuracies=row[: each + 1],
                data=self._describe_data(tasks[each - position]),
                free=self.method.measure_free(),
                bases=self.method.describe_bases(),
                capacity=self.method.compute_capacity(),
                bytes=self._measure_bytes(),
            )
        # Before the checkpoint, after which a resumed run does not get here.
        write_tables(self.folder)
        self._save_checkpoint(learned)

    def consolidate(self, position: int, task: Task) -> None:
        """Update the method's state after a task.

        Args:
            position: Position of the first task that was learned jointly with it.
            task: Task that was learned.
        """
        size = self.method.consolidation_batch or self.config.trainer.batch
        batches = self._iterate_batches(task, size, "consolidate", position)
        self.method.consolidate(batches, self._compute_log_likelihood(task.head))

    def _use_statistics(self, head: int) -> AbstractContextManager[None]:
        return self.norms.use_statistics(head)

    def _test_tasks(self, learned: int) -> list[float]:
        """Return the test accuracy of each task that was learned."""
        accuracies = []
        for position in range(learned):  # one by one: the images of all tasks may not fit in memory as floats
            task = self._get_task(position)
            score = self._evaluate(self._prepare_examples(task.test), task, "test", learned - 1)
            if score.accuracy is not None:
                accuracies.append(score.accuracy)
        return accuracies

    def _evaluate(self, examples: Examples, task: Task, use: str, time: int) -> Score:
        # A new order each time, as published. Where BatchNorm uses the batch's own statistics the loss then has noise.
        # Without it the least loss would be an early epoch's: the loss grows while the accuracy still does.
        order = torch.randperm(len(examples), generator=make_generator(self.config.seed, use, task.head, time))
        token_mask = getattr(self.network, "token_mask", None)
        # Texts of similar lengths are evaluated together, so that little padding is computed.
        if token_mask is not None and len(examples) > 0:
            order = order[token_mask(examples.inputs[order]).sum(1).argsort(stable=True)]
        with self.norms.evaluate_task(task.head):
            return evaluate(
                self.network,
                examples,
                task.head,
                batch=self.config.trainer.test_batch,
                order=order,
                logits=self.method.compute_logits,
            )

    def _measure_bytes(self) -> dict[str, int]:
        found = super()._measure_bytes()
        return found | ({"statistics": nbytes} if (nbytes := self.norms.nbytes) else {})

    # Data

    def load_task(self, position: int) -> Task:
        """Load a task of the stream, with as many examples and in the memory format that the config asks for."""
        task = self._get_task(position)
        train, validation, test = map(self._prepare_examples, (task.train, task.validation, task.test))
        return replace(task, train=train, validation=validation, test=test)

    def _get_task(self, position: int) -> Task:
        # A head that all tasks share accepts any number. It gets the task's, so that methods that store something for
        # each task can tell the tasks apart.
        task = self.stream[position]
        return replace(task, head=position) if self._has_shared_head else task

    def _prepare_examples(self, examples: Examples) -> Examples:
        if self.config.trainer.samples is not None:
            # At random, since the files of some data sets are ordered by class.
            order = torch.randperm(len(examples), generator=make_generator(self.config.seed, "samples"))
            examples = examples[order[: self.config.trainer.samples]]
        inputs = examples.inputs
        if self.config.channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        elif self.device.type == "cpu":
            return examples
        return Examples(inputs.to(self.device), examples.labels.to(self.device))

    def _describe_data(self, task: Task) -> dict[str, Any]:
        """Return the shapes and sizes of a task."""
        return {
            "inputs": list(self.stream.inputs),
            "classes": self.stream.heads[0 if self._has_shared_head else task.head],
            "train": len(task.train),
            "validation": len(task.validation),
            "test": len(task.test),
        }

    def _iterate_batches(self, task: Task, size: int, use: str, position: int) -> Iterable[Batch]:
        """Return an iterable over a task's training examples in random order, the same one each time."""
        order = torch.randperm(len(task.train), generator=make_generator(self.config.seed, use, position))
        return _Batches(task.train, order, size)

    def _iterate_inputs(self, position: int, task: Task) -> Iterator[Tensor]:
        for inputs, _ in self._iterate_batches(task, self.config.trainer.test_batch, "realign", position):
            yield inputs

    def _iterate_passes(self, position: int, tasks: Sequence[Task]) -> Iterator[tuple[Tensor, int | Tensor]]:
        """Yield the forward passes that BatchNorm statistics are estimated from."""
        for task in tasks:
            order = torch.randperm(len(task.train), generator=make_generator(self.config.seed, "statistics", position))
            for rows in split_rows(order[: STATISTICS_EXAMPLES // len(tasks)], self.config.trainer.batch):
                yield from self.method.get_passes((task.train.inputs[rows], task.train.labels[rows]), task.head)


@dataclass(frozen=True)
class _Batches:
    """Batches of examples in a fixed order; can be iterated more than once."""

    examples: Examples
    order: Tensor
    size: int

    def __iter__(self) -> Iterator[Batch]:
        for rows in split_rows(self.order, self.size):
            yield self.examples.inputs[rows], self.examples.labels[rows]
