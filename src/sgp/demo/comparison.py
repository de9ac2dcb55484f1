"""Run the methods of the demo and print what they reach."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sgp.benchmarks.digits import load_stream
from sgp.benchmarks.metrics import acc, bwt
from sgp.benchmarks.settings import Digits
from sgp.demo.settings import DemoSettings
from sgp.experiments.config import Config, configure
from sgp.experiments.folder import RunFolder
from sgp.experiments.summary import read_summary
from sgp.experiments.supervised import SupervisedTrainer
from sgp.report import find_missing_packages
from sgp.report.words import format_count, format_spread

# Phases of a run that are learning: not tests, not checkpoints.
LEARNING = ("train", "consolidate")
# A memory with a smaller free share leaves little capacity for new tasks.
NEARLY_FULL = 0.2


@dataclass(frozen=True)
class Outcome:
    """Result of one run of one method.

    Attributes:
        acc: Average accuracy after the last task, in percent.
        bwt: Backward transfer, in percent.
        seconds: Time for training and the memory's updates, without tests.
        free: Free share of the input dimensions of all layers; None without a memory.
    """

    acc: float
    bwt: float
    seconds: float
    free: float | None


def run_demo(console: Console, demo: DemoSettings) -> dict[str, list[Outcome]]:
    """Train all methods on all seeds with a progress bar, and print the table with what it shows.

    Returns:
        The outcome of each seed by the label of its row.
    """
    outcomes: dict[str, list[Outcome]] = {}
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
    out = _find_new_folder(demo.out)
    with progress:
        rows = 1 + 2 * len(demo.thresholds)
        bar = progress.add_task("", total=rows * demo.seeds * demo.tasks)

        def advance(event: str, values: dict[str, Any]) -> None:
            if event == "task":
                progress.advance(bar)

        # Methods are in the inner loop, so that a busy moment of the machine affects all of them.
        for seed in range(demo.seeds):
            for label, config in _build_configs(seed, demo).items():
                progress.update(bar, description=f"seed {seed + 1} of {demo.seeds}, {label:<10}")
                _, *threshold = label.split()
                name = "-threshold".join([config.name, *threshold])
                assert isinstance(config.benchmark_settings, Digits)
                with RunFolder.begin(out / "runs" / name, config, resume=False) as folder:
                    stream = load_stream(config.benchmark_settings, None, seed)
                    SupervisedTrainer(config, stream, folder, advance).run()
                outcomes.setdefault(label, []).append(_read_outcome(folder))
    console.print(_build_table(outcomes, demo))
    for line in _interpret(outcomes, demo):
        console.print(line, highlight=False)
    with console.status("drawing the page"):
        page = _write_page(out)
    console.print(page, highlight=False, markup=False, soft_wrap=True)
    return outcomes


def _find_new_folder(wanted: Path) -> Path:
    """Return a path that does not exist: as wanted, or with a number appended."""
    names = (wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}") for number in count(1))
    return next(path for path in names if not path.exists())


def _build_configs(seed: int, demo: DemoSettings) -> dict[str, Config[Any]]:
    """Return the config of each row by its label: finetuning, and GPM and SGP at each threshold."""
    methods: dict[str, tuple[str, dict[str, Any]]] = {"finetuning": ("finetune", {})}
    for threshold in demo.thresholds:
        gpm, sgp = _label_rows(threshold, demo)
        methods[gpm] = "gpm", {"threshold": threshold}
        methods[sgp] = "sgp", {"threshold": threshold, "alpha": demo.alpha}
    # For matrices as small as these, more threads than one are slower.
    common: dict[str, Any] = {"tasks": demo.tasks, "epochs": demo.epochs, "seed": seed, "threads": 1}
    return {label: configure("digits", method, **common, **own) for label, (method, own) in methods.items()}


def _label_rows(threshold: float, demo: DemoSettings) -> tuple[str, str]:
    """Return the labels of GPM and SGP at a threshold, which they name if there are several."""
    suffix = f" {threshold:g}" if len(demo.thresholds) > 1 else ""
    return f"GPM{suffix}", f"SGP{suffix}"


def _read_outcome(folder: RunFolder) -> Outcome:
    summary = read_summary(folder)
    layers, matrix = summary.last["bases"], summary.accuracies
    # Over the input dimensions of all layers together.
    free = sum(share * layers[layer]["of"] for layer, share in summary.last["free"].items())
    whole = sum(layer["of"] for layer in layers.values())
    seconds = sum(summary.seconds[phase] for phase in LEARNING)
    return Outcome(acc(matrix), bwt(matrix), seconds, free / whole if whole else None)


def _write_page(out: Path) -> str:
    """Write the page of all runs, and return a line that says where it is."""
    lacking = find_missing_packages()
    if lacking:
        return f"Runs: {out / 'runs'}. No page was written: {lacking}"
    from sgp.report.write import write_report

    return f"Page: {write_report([out / 'runs'], out / 'report').page}"


def _build_table(outcomes: dict[str, list[Outcome]], demo: DemoSettings) -> Table:
    thresholds = " and ".join(f"{threshold:g}" for threshold in demo.thresholds)
    view = Table(
        title=f"{demo.tasks} tasks of permuted digits, one head for all",
        title_justify="left",
        caption=f"mean ± deviation of {format_count(demo.seeds, 'seed')}; MLP 64-100-100-10, SGD,\n"
        f"threshold {thresholds}, SGP's alpha {demo.alpha:g};\nfree: free share of the memory",
        caption_justify="left",
    )
    view.add_column("method")
    for heading in ("ACC (%)", "BWT (%)", "free (%)", "s per run"):
        view.add_column(heading, justify="right", no_wrap=True)
    for method, runs in outcomes.items():
        free = [100 * run.free for run in runs if run.free is not None]
        view.add_row(
            method,
            format_spread([run.acc for run in runs], 1),
            format_spread([run.bwt for run in runs], 1),
            f"{mean(free):.0f}" if free else "-",
            f"{mean(run.seconds for run in runs):.1f}",
        )
    return view


def _interpret(outcomes: dict[str, list[Outcome]], demo: DemoSettings) -> Iterator[str]:
    """Yield a sentence on what the numbers show at each threshold, and one on what to try next."""
    accs = {label: mean(run.acc for run in runs) for label, runs in outcomes.items()}
    for threshold in demo.thresholds:
        gpm, sgp = _label_rows(threshold, demo)
        gain = [ours.acc - theirs.acc for ours, theirs in zip(outcomes[sgp], outcomes[gpm], strict=True)]
        yield (
            f"Seen at threshold {threshold:g}: ACC of GPM {accs[gpm] - accs['finetuning']:+.1f} and of SGP "
            f"{accs[sgp] - accs['finetuning']:+.1f} points against finetuning; SGP {mean(gain):+.1f} against GPM, "
            f"above it on {sum(g > 0 for g in gain)} of {format_count(len(gain), 'seed')}."
        )
    gpm, _ = _label_rows(min(demo.thresholds), demo)
    free = mean(run.free for run in outcomes[gpm] if run.free is not None)
    if free > NEARLY_FULL:
        state, advice = "and more tasks would fill it", f"--tasks {2 * demo.tasks}"
    else:
        state, advice = "and fewer tasks would leave more of it free", f"--tasks {max(2, demo.tasks // 2)}"
    yield f"Next: {100 * free:.0f} % of the memory of {gpm} is free, {state}: try `sgp demo {advice}`."
