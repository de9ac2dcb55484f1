"""``sgp demo``: finetuning, GPM and SGP on permuted digits, in about a minute, and a page of what came out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sgp.benchmarks.metrics import acc, bwt
from sgp.benchmarks.settings.digits import BENCHMARK
from sgp.experiments.config import Config, configure
from sgp.experiments.folder import RunFolder
from sgp.experiments.summary import build_accuracy_matrix, sum_seconds
from sgp.experiments.supervised import SupervisedTrainer
from sgp.report import missing

# As the table calls them.
METHODS = {"finetuning": "finetune", "GPM": "gpm", "SGP": "sgp"}
# What a run spends its time on, without tests and checkpoints.
LEARNING = ("train", "consolidate")
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
    out: Path = Path("sgp-demo")
    """Folder for the runs and the page of them; if it is there already, the next that is not: sgp-demo-2."""

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
    out = _new_folder(demo.out)
    with progress, _one_thread():
        bar = progress.add_task("", total=len(METHODS) * demo.seeds * demo.tasks)

        def watch(event: str, values: dict[str, Any]) -> None:
            if event == "task":
                progress.advance(bar)

        # Methods in the inner loop, so that a busy moment of the machine meets all of them.
        for seed in range(demo.seeds):
            for label in METHODS:
                progress.update(bar, description=f"seed {seed + 1} of {demo.seeds}, {label:<10}")
                config = _config(label, seed, demo)
                with RunFolder.begin(out / "runs" / config.name, config, resume=False) as folder:
                    stream = BENCHMARK.stream(config.benchmark_settings, None, seed)
                    SupervisedTrainer(config, stream, folder, watch).run()
                outcomes.setdefault(label, []).append(_outcome(folder))
    console.print(_table(outcomes, demo))
    for line in _reading(outcomes, demo):
        console.print(line, highlight=False)
    with console.status("drawing the page"):
        page = _page(out)
    console.print(page, highlight=False, markup=False, soft_wrap=True)
    return outcomes


def _new_folder(wanted: Path) -> Path:
    """A folder that is not there yet: as wanted, or with a number after it."""
    names = (wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}") for number in count(1))
    return next(path for path in names if not path.exists())


def _config(label: str, seed: int, demo: Demo) -> Config:
    """What `sgp run digits` would run."""
    memory: dict[str, dict[str, Any]] = {
        "GPM": {"threshold": demo.threshold},
        "SGP": {"threshold": demo.threshold, "alpha": demo.alpha},
    }
    settings: dict[str, Any] = {"tasks": demo.tasks, "epochs": demo.epochs, "seed": seed, "threads": 1}
    config = configure("digits", METHODS[label], **settings, **memory.get(label, {}))
    assert isinstance(config, Config)
    return config


def _outcome(folder: RunFolder) -> Outcome:
    events = folder.read_events()
    tasks = [event for event in events if event["event"] == "task"]
    matrix = build_accuracy_matrix([task["accuracies"] for task in tasks])
    seconds = sum_seconds(events)
    layers = tasks[-1]["bases"]
    # Over the input dimensions of all layers together.
    free = sum(share * layers[layer]["of"] for layer, share in tasks[-1]["free"].items())
    whole = sum(layer["of"] for layer in layers.values())
    return Outcome(acc(matrix), bwt(matrix), sum(seconds[phase] for phase in LEARNING), free / whole if whole else None)


def _page(out: Path) -> str:
    """Make the page of all runs, and say where it lies."""
    lacking = missing()
    if lacking:
        return f"Runs: {out / 'runs'}. There is no page of them: {lacking}"
    from sgp.report.write import write_report

    return f"Page: {write_report([out / 'runs'], out / 'report').page}"


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
