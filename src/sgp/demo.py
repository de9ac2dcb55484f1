"""``sgp demo``: finetuning, GPM and SGP on permuted digits, in about a minute."""

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean, stdev

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

from sgp.benchmarks.digits import permuted_digits
from sgp.benchmarks.metrics import acc, bwt
from sgp.benchmarks.stream import Task
from sgp.networks.mlp import MLP
from sgp.projection import GradientMemory

LEARNING_RATE = 0.1
BATCH = 32
SAMPLES = 300
# A memory with less than this free share leaves little to learn with.
NEARLY_FULL = 0.2
# At this threshold ten tasks leave the memory room, and GPM and SGP end about level.
ROOMY = 0.95


@dataclass(frozen=True)
class Demo:
    """Learn permuted digits one task after another: finetuning, GPM and SGP side by side.

    One head serves all tasks and is protected like the other layers. The defaults were chosen on other seeds than
    those that are shown, and so that the memory fills up, since that is where GPM and SGP differ.
    """

    seeds: int = 5
    """How many times to run each method, with new weights and new orders of pixels each time."""
    tasks: int = 10
    """How many tasks to learn in a row, at least 2."""
    epochs: int = 5
    """How many times to go through each task's training images."""
    alpha: float = 1.0
    """SGP's scale coefficient, at least 0: larger protects more, and inf makes it GPM."""
    threshold: float = 0.985
    """Share of each layer's input energy that the memory holds, in (0, 1]: larger protects more and fills it sooner."""

    def __post_init__(self) -> None:
        for name, least in (("seeds", 1), ("tasks", 2), ("epochs", 1), ("alpha", 0)):
            # Written so that NaN fails too.
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold must be in (0, 1], got {self.threshold}")


@dataclass(frozen=True)
class Outcome:
    """What one run of one method leaves.

    Attributes:
        acc: average accuracy after the last task, in percent.
        bwt: backward transfer, in percent.
        seconds: for training and the memory's updates, without the tests.
        free: what is left of the memory, as a share of the input dimensions of all layers; None without a memory.
    """

    acc: float
    bwt: float
    seconds: float
    free: float | None


def run(console: Console, demo: Demo) -> dict[str, list[Outcome]]:
    """Train all methods on all seeds with a progress bar, print the table and what it says; outcomes by method."""
    outcomes: dict[str, list[Outcome]] = {}
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    alphas = {"finetuning": None, "GPM": math.inf, "SGP": demo.alpha}
    with progress, _one_thread():
        bar = progress.add_task("", total=len(alphas) * demo.seeds * demo.tasks)
        # Methods in the inner loop, so that a busy moment of the machine meets all of them.
        for seed in range(demo.seeds):
            stream = permuted_digits(demo.tasks, seed)
            tasks = [stream[position] for position in range(len(stream))]
            for method, alpha in alphas.items():
                progress.update(bar, description=f"seed {seed + 1} of {demo.seeds}, {method:<10}")
                outcome = _learn(tasks, seed, demo, alpha, lambda: progress.advance(bar))
                outcomes.setdefault(method, []).append(outcome)
    console.print(_table(outcomes, demo))
    for line in _reading(outcomes, demo):
        console.print(line, highlight=False)
    return outcomes


def _learn(tasks: list[Task], seed: int, demo: Demo, alpha: float | None, task_done: Callable[[], object]) -> Outcome:
    """Learn the tasks one after another; without alpha there is no memory and this is finetuning."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    memory = None
    if alpha is not None:
        memory = GradientMemory(model, threshold=demo.threshold, alpha=alpha)
        memory.attach(optimizer)

    # Every method sees the same batches in the same order.
    generator = torch.Generator().manual_seed(seed)
    accuracies = torch.zeros(len(tasks), len(tasks))
    seconds = 0.0
    for index, task in enumerate(tasks):
        start = time.perf_counter()
        for _ in range(demo.epochs):
            _train(model, optimizer, task, generator)
        remembered = torch.randperm(len(task.train.inputs), generator=generator)[:SAMPLES]
        if memory is not None:
            with warnings.catch_warnings():
                # That layers are nearly full is what the demo shows, and its table has a column for it.
                warnings.filterwarnings("ignore", message=".*blocked", category=UserWarning)
                memory.update([task.train.inputs[remembered]])
        seconds += time.perf_counter() - start
        for earlier in range(index + 1):
            accuracies[index, earlier] = _accuracy(model, tasks[earlier])
        task_done()
    return Outcome(100 * acc(accuracies), 100 * bwt(accuracies), seconds, None if memory is None else _free(memory))


def _free(memory: GradientMemory) -> float:
    """The free share of a memory, over the input dimensions of all layers together."""
    layers = memory.capacity().layers
    return sum(layer.free * layer.dimension for layer in layers) / sum(layer.dimension for layer in layers)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, task: Task, generator: torch.Generator) -> None:
    """One epoch, as any PyTorch user would write it: the memory asks for nothing here."""
    order = torch.randperm(len(task.train.labels), generator=generator)
    for batch in torch.split(order, BATCH):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(task.train.inputs[batch]), task.train.labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@torch.no_grad()
def _accuracy(model: nn.Module, task: Task) -> float:
    return float((model(task.test.inputs).argmax(dim=1) == task.test.labels).float().mean())


@contextmanager
def _one_thread() -> Iterator[None]:
    """These matrices are so small that sharing them between threads costs more than it gives."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _table(outcomes: dict[str, list[Outcome]], demo: Demo) -> Table:
    view = Table(
        title=f"{demo.tasks} tasks of permuted digits, one head for all",
        title_justify="left",
        caption=f"mean ± deviation of {_count(demo.seeds, 'seed')}; MLP 64-100-100-10, SGD,\n"
        f"threshold {demo.threshold:g}, SGP's alpha {demo.alpha:g}; free: what is left of the memory",
        caption_justify="left",
    )
    view.add_column("method")
    for heading in ("ACC (%)", "BWT (%)", "free (%)", "s per run"):
        view.add_column(heading, justify="right", no_wrap=True)
    for method, runs in outcomes.items():
        free = [100 * run.free for run in runs if run.free is not None]
        view.add_row(
            method,
            _spread([run.acc for run in runs]),
            _spread([run.bwt for run in runs]),
            f"{mean(free):.0f}" if free else "-",
            f"{mean(run.seconds for run in runs):.1f}",
        )
    return view


def _spread(values: list[float]) -> str:
    """Mean and sample standard deviation; one value has none."""
    return f"{mean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _reading(outcomes: dict[str, list[Outcome]], demo: Demo) -> Iterator[str]:
    """What is seen in these numbers, whichever way they came out, and what to do next."""
    accs = {method: mean(run.acc for run in runs) for method, runs in outcomes.items()}
    gain = [ours.acc - theirs.acc for ours, theirs in zip(outcomes["SGP"], outcomes["GPM"], strict=True)]
    free = mean(run.free for run in outcomes["GPM"] if run.free is not None)
    yield (
        f"Seen: against finetuning GPM ends {accs['GPM'] - accs['finetuning']:+.1f} points of ACC and SGP "
        f"{accs['SGP'] - accs['finetuning']:+.1f}; SGP against GPM {mean(gain):+.1f}, "
        f"above it on {sum(g > 0 for g in gain)} of {_count(len(gain), 'seed')}."
    )
    if free > NEARLY_FULL:
        state, advice = "and more tasks would fill it", f"--tasks {2 * demo.tasks}"
    elif demo.threshold > ROOMY:
        state, advice = "and a lower threshold may serve both methods better", f"--threshold {ROOMY}"
    else:
        state, advice = "and fewer tasks would leave it room", f"--tasks {max(2, demo.tasks // 2)}"
    yield f"Next: GPM has {100 * free:.0f} % of its memory left, {state}: try `sgp demo {advice}`."
