"""Learn a stream of tasks one after another, in a way that can be stopped at any moment and taken up again.

Everything random is drawn from seeds that depend on the run's seed, the task and the epoch alone. So a checkpoint needs
no random state, and an evaluation more or less changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

from sgp.benchmarks.metrics import acc, bwt
from sgp.benchmarks.stream import Examples, Stream, Task
from sgp.experiments.averaging import WeightAverage
from sgp.experiments.batch_norm import MixedStatistics
from sgp.experiments.config import Config
from sgp.experiments.evaluation import Score, batches, evaluate, mean_score
from sgp.experiments.experiment import Callback, Experiment
from sgp.experiments.folder import RunError, RunFolder
from sgp.experiments.norm_policy import TaskStatistics, estimate_statistics, put_statistics
from sgp.experiments.realign import earlier_answers, head_of, realign
from sgp.experiments.schedules import SCHEDULES, Schedule
from sgp.experiments.seeds import generator_for, seed_for
from sgp.experiments.summary import accuracy_matrix, write_tables
from sgp.methods import METHODS, Batch, Moment
from sgp.networks import NETWORKS

EMPTY: Mapping[str, Any] = {}
# A step of Adam is some ten passes over all parameters, a fused one is a single pass: a fifth of a step of MiniLM less.
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": SGD,
    "adam": partial(Adam, fused=True),
    "adamw": partial(AdamW, fused=True),
}
# Of a group of parameters: its learning rate as a multiple of the others'.
RATE = "rate"
# Means and variances of maps over as many examples are exact enough; all of them would cost a third of an epoch.
STATISTICS_EXAMPLES = 1024
# What stored statistics stand for beside those of a test batch, with norm_statistics=mixed.
STORED_EXAMPLES = 192


class SupervisedTrainer(Experiment):
    """One run: a network, a method and how far they are.

    Args:
        config: of the run.
        stream: its tasks.
        folder: where it leaves its traces; with a checkpoint there, the run goes on from it.
        callbacks: are told of every event.
    """

    def __init__(self, config: Config, stream: Stream, folder: RunFolder, *callbacks: Callback) -> None:
        super().__init__(folder, *callbacks)
        self.config = config
        self.stream = stream
        self.network = build_network(config, stream)
        refuse_single_rows(config, self.network)
        # Heads belong to single tasks and need no protection, unless all tasks share one.
        self._of_single_tasks = ["heads.*"] if len(stream.heads) > 1 else []
        try:
            self.method = METHODS[config.method](self.network, config.method_settings, exclude=self._of_single_tasks)
        except TypeError as error:  # a layer that the method cannot deal with
            raise ValueError(f"{config.method} does not go with the network {config.network}: {error}") from error
        if config.trainer.head_lr is not None:
            refuse_untrained_heads(self.network, self.trained)
        if config.trainer.realign:
            refuse_shared_head(self.network, stream)
        self.accuracies: list[list[float]] = []
        self.statistics = TaskStatistics()

    def run(self) -> None:
        """Learn what is left to learn."""
        progress, parts = self.folder.load() or ({"task": 0, "accuracies": []}, {})
        self.accuracies = progress["accuracies"]
        if parts:
            # First the method: it may have to build what the weights are of.
            self.method.load_state_dict(parts["method"])
            self.trained.load_state_dict(parts["network"])
            self.statistics.load_state_dict(parts.get("statistics", {}))
        position = progress["task"]
        together = len(self.stream) if self.method.trains_jointly else 1
        while position < len(self.stream):
            tasks = [self.task(each) for each in range(position, position + together)]
            self.learn(position, tasks, progress, parts)
            self._finish(position, tasks)
            position, progress, parts = position + together, {}, {}
        matrix = accuracy_matrix(self.accuracies)
        self._log("end", acc=acc(matrix), bwt=bwt(matrix) if len(matrix) > 1 else None)

    @property
    def trained(self) -> nn.Module:
        """The network, with what the method may train beside it."""
        return self.method.trained

    def _optimizer(self) -> Optimizer:
        training = self.config.trainer
        kind = OPTIMIZERS[training.optimizer]
        optimizer = self.method.optimizer(kind, training.lr)
        if training.head_lr is not None:
            set_heads_apart(optimizer, self.network, training.head_lr / training.lr)
        return optimizer

    def learn(
        self,
        position: int,
        tasks: Sequence[Task],
        progress: Mapping[str, Any] = EMPTY,
        parts: Mapping[str, Any] = EMPTY,
    ) -> None:
        """Train on one task, or on several at once.

        Args:
            position: of the first task in the stream.
            tasks: themselves.
            progress: of a checkpoint inside the task; empty to begin it.
            parts: of the same checkpoint.
        """
        training = self.config.trainer
        for number, task in enumerate(tasks, start=position + 1):
            if training.schedule == "patience" and len(task.validation) == 0:
                raise RunError(
                    f"task {number} ({task.name}) has no validation examples, which schedule=patience needs: "
                    "try a larger --validation"
                )
        try:
            if self.method.supervised_only and "schedule" not in progress:
                with self._timed("begin"), self._seeded("begin", position):
                    for task in tasks:
                        self.method.begin(task.head, self._random_batches(task, training.batch, "begin", position))
            optimizer = self._optimizer()
        except (TypeError, ValueError) as error:  # a layer, or a way of training, that the method cannot deal with
            raise RunError(f"{self.config.method} cannot learn on {self.config.network} so: {error}") from error
        self.method.attach(optimizer)
        schedule = SCHEDULES[training.schedule](training)
        average = self._average(position) if training.average else None
        answers = self._earlier_answers(position, tasks[0], parts) if self._realigns(position) else {}
        best: dict[str, Tensor] | None = None
        if "schedule" in progress:
            schedule.load_state_dict(progress["schedule"])
            restore_optimizer(optimizer, parts.get("optimizer", {}))
            if average:
                try:
                    average.load_state_dict(parts)
                except KeyError as error:  # of a version that averaged otherwise
                    raise RunError(f"the checkpoint has no part {error}: begin again under another --name") from error
            best = parts.get("best")

        while not schedule.done:
            with self._timed("train"):
                loss = self._epoch(position, tasks, optimizer, schedule, average)
                self.method.settle()
            with self._timed("validate"), average.applied() if average else nullcontext():
                if any(len(task.validation) for task in tasks):  # else nobody asks for them before the task ends
                    self._estimate_statistics(position, tasks)
                score = mean_score(
                    [self._score(task.validation, task, "validation", schedule.epochs) for task in tasks]
                )
            lr = schedule.rate(0.0)
            if not math.isfinite(loss) or not math.isfinite(score.loss or 0.0):
                raise RunError(
                    f"the loss of task {position + 1} ({tasks[0].name}) is no number after epoch "
                    f"{schedule.epochs + 1}: try a lower --lr than {training.lr:g}"
                )
            if schedule.observe(score.loss):
                best = {name: tensor.clone() for name, tensor in self.trained.state_dict().items()}
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
                self._save(position, schedule, optimizer=optimizer, average=average, best=best, answers=answers)

        if average is not None:
            average.keep()
        elif best is not None:
            self.trained.load_state_dict(best)
        if answers:
            with self._timed("realign"):
                inputs = self._inputs_for_realigning(position, tasks[0])
                realign(self.network, range(position), answers["logits"], inputs, tasks[0].head)
        self._estimate_statistics(position, tasks)

    def _realigns(self, position: int) -> bool:
        """Whether earlier tasks have heads of their own, which are to follow."""
        return self.config.trainer.realign and position > 0 and bool(self._of_single_tasks)

    def _earlier_answers(self, position: int, task: Task, parts: Mapping[str, Any]) -> dict[str, Tensor]:
        """Of earlier tasks' heads to a task's examples, before it is learned; parts: of a checkpoint inside it."""
        if "answers" in parts:
            return dict(parts["answers"])
        with self._timed("realign"):
            inputs = self._inputs_for_realigning(position, task)
            return {"logits": earlier_answers(self.network, range(position), inputs, task.head)}

    def _inputs_for_realigning(self, position: int, task: Task) -> Iterator[Tensor]:
        for inputs, _ in self._random_batches(task, self.config.trainer.test_batch, "realign", position):
            yield inputs

    def _average(self, position: int) -> WeightAverage:
        """Of a task's weights. The first task has none before it to go back to."""
        training = self.config.trainer
        share = training.interpolation_weight if position else 0.0
        return WeightAverage(self.trained, training.average, old_share=share, new=self._of_single_tasks)

    def _epoch(
        self,
        position: int,
        tasks: Sequence[Task],
        optimizer: Optimizer,
        schedule: Schedule,
        average: WeightAverage | None,
    ) -> float:
        """One pass over the training data; the mean loss."""
        whole, total, seen = sum(len(task.train) for task in tasks), 0.0, 0
        self.network.train()
        with self._seeded("dropout", position, schedule.epochs):
            for task, rows in self._lots(position, tasks, schedule.epochs):
                share = seen / whole
                for group in optimizer.param_groups:
                    group["lr"] = schedule.rate(share) * group.get(RATE, 1.0)
                moment = Moment(schedule.epochs, share, (schedule.epochs + share) / self.config.trainer.epochs)
                loss = self.method.step(
                    (task.train.inputs[rows], task.train.labels[rows]), task.head, moment, optimizer
                )
                if average is not None:
                    average.update()
                total += loss * len(rows)
                seen += len(rows)
        return total / seen

    def _lots(self, position: int, tasks: Sequence[Task], epoch: int) -> Iterator[tuple[Task, Tensor]]:
        """The rows of each batch of an epoch and their task; batches of several tasks come in random order."""
        seed, lots = self.config.seed, []
        for offset, task in enumerate(tasks):
            order = torch.randperm(len(task.train), generator=generator_for(seed, "order", position + offset, epoch))
            lots += [(task, rows) for rows in batches(order, self.config.trainer.batch)]
        if len(tasks) > 1:
            turns = torch.randperm(len(lots), generator=generator_for(seed, "turns", position, epoch))
            lots = [lots[turn] for turn in turns.tolist()]
        yield from lots

    def _estimate_statistics(self, position: int, tasks: Sequence[Task]) -> None:
        """Bring stored statistics of BatchNorm in line with the weights, where the method leaves that to us."""
        kind = self.method.statistics
        # Where all tasks share a head, nobody says at test whose statistics are meant.
        if kind == "own" or (kind == "each" and len(self.stream.heads) == 1):
            return
        with self._seeded("statistics", position):
            found = estimate_statistics(self.network, self._for_statistics(position, tasks))
        if kind == "each":
            self.statistics.keep(tasks[0].head, found)
        else:
            put_statistics(self.network, found)

    def _for_statistics(self, position: int, tasks: Sequence[Task]) -> Iterator[tuple[Tensor, int | Tensor]]:
        for task in tasks:
            order = torch.randperm(len(task.train), generator=generator_for(self.config.seed, "statistics", position))
            for rows in batches(order[: STATISTICS_EXAMPLES // len(tasks)], self.config.trainer.batch):
                yield from self.method.passes((task.train.inputs[rows], task.train.labels[rows]), task.head)

    def _finish(self, position: int, tasks: Sequence[Task]) -> None:
        """Let the method take the tasks in, and test all that were learned so far."""
        with self._timed("consolidate"), self._seeded("consolidate", position):
            for task in tasks:
                self.consolidate(position, task)
        learned = position + len(tasks)
        with self._timed("test"):
            # One after another: the floats of all tasks at once may not fit in memory.
            seen = map(self._whole_task, range(learned))
            scores = [self._score(self._laid_out(each.test), each, "test", position).accuracy for each in seen]
        row = [accuracy for accuracy in scores if accuracy is not None]
        # Tasks that were learned at once have a row each, as if nothing had been learned after them.
        for each in range(position, learned):
            self.accuracies = [*self.accuracies, row[: each + 1]]
            self._log(
                "task",
                task=each,
                name=tasks[each - position].name,
                accuracies=row[: each + 1],
                data=self._sizes(tasks[each - position]),
                free=self.method.free(),
                bases=self.method.bases(),
                capacity=self.method.capacity(),
                bytes=self._bytes(),
            )
        # Before the checkpoint, after which a resumed run does not come back here.
        write_tables(self.folder)
        self._save(learned)

    def _bytes(self) -> dict[str, int]:
        """Memory by what it is for."""
        network = {"network": sum(p.nbytes for p in self.network.parameters())}
        return network | ({"statistics": kept} if (kept := self.statistics.nbytes) else {}) | self.method.bytes()

    def consolidate(self, position: int, task: Task) -> None:
        """Let the method take in a task. position: of the first task that was learned with it."""
        size = self.method.consolidation_batch or self.config.trainer.batch
        self.method.consolidate(self._random_batches(task, size, "consolidate", position), self._log_likelihood(task))

    def _sizes(self, task: Task) -> dict[str, Any]:
        """How large a task is."""
        heads = self.stream.heads
        return {
            "inputs": list(self.stream.inputs),
            "classes": heads[task.head if len(heads) > 1 else 0],
            "train": len(task.train),
            "validation": len(task.validation),
            "test": len(task.test),
        }

    def task(self, position: int) -> Task:
        """A task of the stream, cut down and laid out in memory as the config says."""
        task = self._whole_task(position)
        train, validation, test = map(self._laid_out, (task.train, task.validation, task.test))
        return replace(task, train=train, validation=validation, test=test)

    def _whole_task(self, position: int) -> Task:
        # A head that all tasks share answers to any number. It is called by the task's, by which a method that has
        # something for each task can tell them apart.
        task = self.stream[position]
        return replace(task, head=position) if len(self.stream.heads) == 1 else task

    def _laid_out(self, examples: Examples) -> Examples:
        if self.config.samples is not None:
            # Drawn, since the files of some data sets are in the order of their classes.
            order = torch.randperm(len(examples), generator=generator_for(self.config.seed, "samples"))
            examples = examples[order[: self.config.samples]]
        if not self.config.channels_last or examples.inputs.dim() != 4:
            return examples
        return Examples(examples.inputs.contiguous(memory_format=torch.channels_last), examples.labels)

    def _score(self, examples: Examples, task: Task, use: str, time: int) -> Score:
        # Another order each time, as published. Where BatchNorm divides by the batch's own statistics a loss then has
        # noise, without which the least one would be an early epoch's: the loss grows while the accuracy still does.
        order = torch.randperm(len(examples), generator=generator_for(self.config.seed, use, task.head, time))
        token_mask = getattr(self.network, "token_mask", None)
        # Texts of like length together, so that little padding is computed.
        if token_mask is not None and len(examples) > 0:
            order = order[token_mask(examples.inputs[order]).sum(1).argsort(stable=True)]
        mixed = MixedStatistics(STORED_EXAMPLES) if self.config.norm_statistics == "mixed" else nullcontext()
        with self.statistics.of(task.head, self.network), mixed:
            return evaluate(
                self.network,
                examples,
                task.head,
                batch=self.config.trainer.test_batch,
                order=order,
                logits=self.method.logits,
            )

    def _random_batches(self, task: Task, size: int, use: str, position: int) -> Iterable[Batch]:
        order = torch.randperm(len(task.train), generator=generator_for(self.config.seed, use, position))
        return _Batches(task.train, order, size)

    def _log_likelihood(self, task: Task) -> Callable[[Batch], Tensor]:
        def log_likelihood(batch: Batch) -> Tensor:
            inputs, labels = batch
            with self.statistics.of(task.head, self.network):
                return -F.cross_entropy(self.method.logits(inputs, task.head), labels, reduction="none")

        return log_likelihood

    def _save(
        self,
        position: int,
        schedule: Schedule | None = None,
        *,
        optimizer: Optimizer | None = None,
        average: WeightAverage | None = None,
        **weights: dict[str, Tensor] | None,
    ) -> None:
        """Write a checkpoint: at the start of a task, or with a schedule inside it."""
        progress: dict[str, Any] = {"task": position, "accuracies": self.accuracies}
        parts: dict[str, dict[str, Any]] = {"network": self.trained.state_dict(), "method": self.method.state_dict()}
        if schedule is not None:
            progress["schedule"] = schedule.state_dict()
        if optimizer is not None and optimizer.state:
            parts["optimizer"] = optimizer_state(optimizer)
        parts |= {name: kept for name, kept in weights.items() if kept}
        if average is not None:
            parts |= average.state_dict()
        if statistics := self.statistics.state_dict():
            parts["statistics"] = statistics
        self.folder.save(progress, parts)

    @contextmanager
    def _seeded(self, use: str, *position: int) -> Iterator[None]:
        """Torch's global random numbers for a use; those of before come back afterwards."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_for(self.config.seed, use, *position))
            yield


@dataclass(frozen=True)
class _Batches:
    """Examples in an order, in lots of a size, as often as they are asked for."""

    examples: Examples
    order: Tensor
    size: int

    def __iter__(self) -> Iterator[Batch]:
        for rows in batches(self.order, self.size):
            yield self.examples.inputs[rows], self.examples.labels[rows]


def set_heads_apart(optimizer: Optimizer, network: nn.Module, rate: float) -> None:
    """Give the network's heads a group of their own, with so many times the learning rate of the others."""
    heads = {id(parameter) for parameter in _heads(network)}
    own: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        own += [parameter for parameter in group["params"] if id(parameter) in heads]
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in heads]
    optimizer.add_param_group({"params": own, RATE: rate})


def refuse_untrained_heads(network: nn.Module, trained: nn.Module) -> None:
    """A rate of their own is of no use for heads that are not there, or are not what is trained."""
    own = {id(parameter) for parameter in trained.parameters()}
    if not any(id(parameter) in own for parameter in _heads(network)):
        raise ValueError("head_lr is for heads of the network that are trained, and there are none")


def refuse_shared_head(network: nn.Module, stream: Stream) -> None:
    """A head that learns the new task too cannot follow its features for the sake of an earlier one."""
    try:
        if len(stream.heads) < len(stream):
            raise AttributeError("all tasks share one")
        for task in range(len(stream)):
            head_of(network, task)
    except AttributeError as error:
        raise ValueError(f"realign is for networks with a linear head for each task: {error}") from error


def _heads(network: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in network.named_parameters() if name.startswith("heads.")]


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer remembers of each parameter, by the parameter's number."""
    return {str(number): dict(own) for number, own in optimizer.state_dict()["state"].items()}


def restore_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Go on from an `optimizer_state`; the learning rate and other options are the optimizer's own."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, own in state.items():
        parameter = parameters[int(number)]
        for name, value in own.items():
            # In memory as the parameter is, as the optimizer itself would have made it.
            alike = isinstance(value, Tensor) and value.shape == parameter.shape
            optimizer.state[parameter][name] = torch.empty_like(parameter).copy_(value) if alike else value


def refuse_single_rows(config: Config, network: nn.Module) -> None:
    """BatchNorm of vectors cannot normalise a batch of one example by the batch's own statistics."""
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm1d)]
    by_the_batch = {"batch": bool(norms), "test_batch": any(not norm.track_running_stats for norm in norms)}
    for name, matters in by_the_batch.items():
        if matters and getattr(config.trainer, name) < 2:
            raise ValueError(f"{name} must be at least 2 for the BatchNorm of {config.network}, got 1")


def build_network(config: Config, stream: Stream) -> nn.Module:
    """The config's network for a stream, with the seed's weights."""
    kind = NETWORKS[config.network]
    stored = "batch" if config.norm_statistics == "batch" else "stored"
    offered = {"statistics": stored, "bias": config.network_bias}
    options = {name: value for name, value in offered.items() if name in kind.options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(config.seed, "weights"))
        network = kind.build(stream.inputs, stream.heads, **options)
    if config.channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network
