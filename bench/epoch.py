"""An epoch of a later Split CIFAR-100 task, training and validation: our loop with each method, and as published.

The images are random, since no time here depends on what they show. The memories have the ranks of real training.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from bench import published, steps
from bench.row import Row
from bench.timing import take_turns
from sgp.benchmarks.stream import Examples, Stream, Task
from sgp.experiments.config import configure
from sgp.experiments.folder import RunFolder
from sgp.experiments.summary import sum_seconds
from sgp.experiments.supervised import SupervisedTrainer
from sgp.methods.gpm import GPM

TRAIN, VALIDATION, BATCH = 4750, 250, 64
# The published code evaluates the training set after every epoch too, and prints it.
GOAL = 1 / 3


def row(*, rounds: int) -> Row:
    """Seconds per epoch."""
    torch.manual_seed(0)
    task = Task("random", 1, _examples(TRAIN), _examples(VALIDATION), _examples(BATCH))
    with tempfile.TemporaryDirectory() as place:
        folders = {method: RunFolder(Path(place) / method) for method in ("finetune", "gpm", "sgp")}
        ways: dict[str, Callable[[], object]] = {
            method: _our_epoch(method, folder, task) for method, folder in folders.items()
        }
        ways["published"] = _published_epoch(task)
        times = take_turns(ways, rounds=rounds)
        phases = {method: _shares(sum_seconds(folder.read_events())) for method, folder in folders.items()}
    return Row(
        name="epoch of a later CIFAR task",
        unit="s",
        amounts={
            "plain": times.median("finetune"),
            "sgp": times.median("sgp"),
            "published": times.median("published"),
        },
        against="published",
        ratio=times.ratio("sgp", to="published"),
        goal=GOAL,
        note=", ".join(f"{method} {times.median(method):.2f} s" for method in folders)
        + "; of SGP's "
        + ", ".join(f"{phase} {100 * share:.1f} %" for phase, share in phases["sgp"].items()),
        detail={
            "ranks": steps.alexnet_ranks(),
            "shares of phases": phases,
            "rounds": dict(times.seconds),
        },
    )


def _examples(count: int) -> Examples:
    return Examples(torch.randn(count, 3, 32, 32), torch.randint(0, 10, (count,)))


def _our_epoch(method: str, folder: RunFolder, task: Task) -> Callable[[], object]:
    """One epoch of our loop with all that belongs to it, checkpoint included."""
    folder.path.mkdir()
    config = configure("split-cifar100", method, epochs=1)
    learner = SupervisedTrainer(config, Stream(["first", task.name], (3, 32, 32), [10] * 10, lambda _: task), folder)
    if isinstance(learner.method, GPM):
        found = steps.subspaces(learner.network, steps.alexnet_ranks(), constant=False)
        steps.remember(learner.method.memory, found)
    laid_out = learner.load_task(1)
    return lambda: learner.train(1, [laid_out])


def _published_epoch(task: Task) -> Callable[[], object]:
    """One epoch with dense projectors, then a pass over the training set and one over the validation set."""
    network = published.AlexNet()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    projectors = steps.projectors(network, steps.alexnet_ranks())

    def epoch() -> None:
        network.train()
        for rows in torch.split(torch.randperm(len(task.train)), BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(network(task.train.inputs[rows])[task.head], task.train.labels[rows])
            torch.autograd.backward(loss)
            published.project_dense(network, projectors)
            optimizer.step()
        network.eval()
        for examples in (task.train, task.validation):
            _evaluate(network, examples, task.head)

    return epoch


@torch.no_grad()
def _evaluate(network: published.AlexNet, examples: Examples, head: int) -> Tensor:
    correct = torch.tensor(0)
    for rows in torch.split(torch.randperm(len(examples)), BATCH):
        correct += (network(examples.inputs[rows])[head].argmax(1) == examples.labels[rows]).sum()
    return correct


def _shares(seconds: dict[str, float]) -> dict[str, float]:
    whole = sum(seconds.values())
    return {phase: round(time / whole, 4) for phase, time in seconds.items()}
