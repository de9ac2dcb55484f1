"""A training step of the third Split CIFAR-100 task with each method, against GPM's: the paper's Table 5.

Every method has really learned two small tasks before, so that it does all that it does in a long run: buffers have
examples, masks and Fisher informations are there, old tasks are trusted. The images are random but smooth like
photographs, so that there are about as many bases as with real ones (`ranks` in the detail; compare bench/ranks.json).
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.row import Row
from bench.timing import take_turns
from sgp import paper
from sgp.benchmarks.stream import Examples, Stream, Task
from sgp.experiments.config import Config, configure
from sgp.experiments.folder import RunFolder
from sgp.experiments.optimizers import OPTIMIZERS
from sgp.experiments.supervised import SupervisedTrainer
from sgp.methods import Batch, Moment
from sgp.methods.gpm import GPM

BENCHMARK, CLASSES = "split-cifar100", [10] * 10
LEARNED, EXAMPLES, BATCH = 2, 320, 64
# A step of multitask and STL is finetuning's; methods that expand the network have their time elsewhere.
METHODS = ("finetune", "ewc", "si", "hat", "owm", "a-gem", "er", "der", "gpm", "sgp", "trgp", "fs-dgpm")
GOALS = {"sgp": 1.03, "trgp": 1.4, "a-gem": 2.2, "fs-dgpm": 6.0}


def rows(*, rounds: int) -> list[Row]:
    """Seconds per step of each method; the ratio is to GPM's."""
    torch.manual_seed(0)
    # Of all training on one GPU, whatever it consists of.
    published = paper.times(BENCHMARK)
    tasks = [_task(head) for head in range(LEARNED + 1)]
    stream = Stream([task.name for task in tasks[:LEARNED]], (3, 32, 32), CLASSES, tasks.__getitem__)
    learners = {method: learned(_config(method), stream) for method in METHODS}
    ways = {method: stepper(learner, tasks[LEARNED], 1) for method, learner in learners.items()}
    times = take_turns(ways, rounds=rounds, repeat=2, warm=1)
    return [
        Row(
            name=f"step of {method}",
            unit="s",
            amounts={"plain": times.median("finetune"), "sgp": times.median(method)},
            against="gpm",
            ratio=times.ratio(method, to="gpm"),
            published_ratio=published.get(method),
            goal=GOALS.get(method),
            detail={"ranks": ranks(learners[method]), "rounds": times.seconds[method]},
        )
        for method in METHODS
    ]


def _task(head: int) -> Task:
    parts = (_examples(head, EXAMPLES), _examples(head, BATCH), _examples(head, BATCH))
    return Task(f"smooth {head}", head, *parts)


def _examples(head: int, count: int) -> Examples:
    """Random images in which frequencies fade as in photographs, around one image for each class."""
    labels = torch.randint(0, CLASSES[head], (count,))
    pattern = _smooth(torch.randn(CLASSES[head], 3, 32, 32, generator=torch.Generator().manual_seed(head)))
    return Examples(pattern[labels] + _smooth(torch.randn(count, 3, 32, 32)), labels)


def _smooth(noise: Tensor) -> Tensor:
    """Noise that is mostly grey, with amplitudes that fall with the frequency, of unit variance."""
    rows, columns = torch.fft.fftfreq(32), torch.fft.rfftfreq(32)
    frequency = torch.hypot(rows.unsqueeze(1), columns).clamp(min=1 / 32)
    image: Tensor = torch.fft.irfft2(torch.fft.rfft2(noise[:, :1] + noise / 2) / frequency**1.5, s=(32, 32))
    return image / image.std()


def _config(method: str) -> Config[Any]:
    return configure(BENCHMARK, method, epochs=1, threads=torch.get_num_threads())


def learned(config: Config[Any], stream: Stream) -> SupervisedTrainer:
    """Create a method that has learned some tasks."""
    with tempfile.TemporaryDirectory() as place:
        learner = SupervisedTrainer(config, stream, RunFolder(Path(place)))
        learner.run()
    return learner


def stepper(learner: SupervisedTrainer, task: Task, count: int) -> Callable[[], object]:
    """Take some steps of a task, as the training loop does."""
    method, network, training = learner.method, learner.network, learner.config.trainer
    batches, moment = batches_of(task, training.batch), Moment(epoch=1, share_of_epoch=0.5, share_of_task=0.5)
    method.begin_task(task.head, [(task.train.inputs, task.train.labels)])
    optimizer = method.build_optimizer(OPTIMIZERS[training.optimizer], training.lr)
    method.attach(optimizer)
    network.train()

    def steps() -> None:
        for batch in batches[:count]:
            method.step(batch, task.head, moment, optimizer)

    return steps


def batches_of(task: Task, size: int) -> list[Batch]:
    """Return a task's training examples."""
    inputs, labels = task.train.inputs, task.train.labels
    if inputs.dim() == 4:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    return list(zip(torch.split(inputs, size), torch.split(labels, size), strict=True))


def ranks(learner: SupervisedTrainer) -> dict[str, int]:
    """Bases of each layer, for methods that have them."""
    if not isinstance(learner.method, GPM):
        return {}
    return {name: int(space.rank.sum()) for name, space in learner.method.memory.subspaces.items()}
