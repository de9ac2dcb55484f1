"""``sgp sweep FILE.yaml``"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from sgp.benchmarks.datasets.images import DataError
from sgp.cli.run import Work, import_file, work_of
from sgp.cli.sweep_display import SweepDisplay, print_outcome, status_in_words
from sgp.experiments.config import AnyConfig, as_command, as_yaml, differences
from sgp.experiments.folder import CONFIG, RunError, RunFolder
from sgp.experiments.jobs import Events, Job, run_here
from sgp.experiments.sweep import Sweep, outcome, read_sweep
from sgp.rl.settings import GameError

# For the processes of a sweep that was killed to be gone, in seconds.
PATIENCE = 10.0


@dataclass(frozen=True)
class Options:
    """Run a grid of runs: every method with every seed and every value of its settings.

    The file is a config file in which any value may be a list. What is finished already is not run again, and what was
    stopped goes on, so the same command takes up a sweep that was stopped.
    """

    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """The grid; `alpha` is the paper's study of alpha."""
    out: Path = Path("runs")
    """Folder that the runs' own folders go to."""
    data: Path | None = None
    """Folder of the data sets; without it $SGP_DATA."""
    jobs: int | None = None
    """Runs at once on this machine; without it as many as there are cores for their threads."""
    ray: str | None = None
    """Address of a Ray cluster to run on instead: `auto` for the one of this machine, `local` for a new one. All
    its nodes must see the same files."""
    retries: int = 3
    """With --ray: how often a run is taken up again whose node or process was killed."""
    import_: Annotated[tuple[str, ...], tyro.conf.arg(name="import"), tyro.conf.UseAppendAction] = ()
    """A Python file of yours that registers a method, network or benchmark; may be given several times."""
    plan: tyro.conf.FlagCreatePairsOff[bool] = False
    """Say what would be run, and run nothing."""

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise ValueError(f"jobs must be at least 1, got {self.jobs}")
        if self.retries < 0:
            raise ValueError(f"retries must be at least 0, got {self.retries}")
        if self.ray is not None and self.ray not in ("auto", "local") and ":" not in self.ray:
            raise ValueError(f"ray must be auto, local or an address with a port, got {self.ray!r}")
        if self.jobs is not None and self.ray is not None:
            raise ValueError("jobs is for this machine: with --ray the cluster says how many run at once")


def main(arguments: list[str]) -> int:
    """Run the grid of a file."""
    options = tyro.cli(Options, prog="sgp sweep", args=arguments or ["--help"])
    console = Console()
    again = shlex.join(["sgp", "sweep", *arguments])
    try:
        for script in options.import_:
            import_file(script)
        sweep = read_sweep(options.file)
        # Absolute, so that it is the same on all nodes of a cluster.
        folders = {options.out.absolute() / point.name: point for point in sweep.points}
        configs = {path: _agreed(path, point.config) for path, point in folders.items()}
        left = {path: config for path, config in configs.items() if outcome(path) is None}
        if not options.plan:
            _check(left.values(), options.data)
            _refuse_busy(list(left))
    except (ValueError, ImportError, RunError, GameError) as error:
        print(f"sgp sweep: {error}", file=sys.stderr)
        return 1 if isinstance(error, DataError | RunError | GameError) else 2
    at_once, jobs = _jobs(left, options)
    _print_heading(console, options, sweep, at_once, jobs)
    if options.plan:
        for job in jobs:
            print(shlex.join(["sgp", *job.arguments]))
        return 0
    # A batch system that ends a job asks first.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with SweepDisplay(console, left) as display, closing(_run(jobs, at_once, options)) as events:
            failed = {job: status for job, status in display.follow(events) if status}
    except KeyboardInterrupt:
        finished = sum(outcome(path) is not None for path in folders)
        _say(console, f"Stopped with {finished} of {len(folders)} runs finished; go on with: {again}")
        return 130
    except (RunError, ImportError, OSError) as error:
        print(f"sgp sweep: {error}", file=sys.stderr)
        return 2 if isinstance(error, ImportError) else 1
    print_outcome(console, [(point, path) for path, point in folders.items()])
    _say(console, f"{len(folders) - len(failed)} of {len(folders)} runs are finished, in {options.out}")
    for job, status in failed.items():
        _say(console, f"failed: {job.folder.name}, {status_in_words(status)}", "red")
        _say(console, f"  {_last_line(job.log)}")
        _say(console, f"  its output is in {options.out / job.folder.name / job.log.name}")
    if failed:
        _say(console, f"try what failed again with: {again}")
    return 1 if failed else 0


def _agreed(path: Path, config: AnyConfig) -> AnyConfig:
    """The config of a run, with the threads that it was begun with.

    Raises:
        RunError: in its folder is a run of another config.
    """
    if not (path / CONFIG).exists():
        return config
    known = RunFolder(path).read_config()
    config = replace(config, threads=config.threads or known.threads)
    other = list(differences(config, known))
    if other:
        raise RunError(f"{path} is a run with other settings ({'; '.join(other)}): use another --out")
    return config


def _check(configs: Iterable[AnyConfig], data: Path | None) -> None:
    """Read the data, try the games and build each kind of run once, since what cannot begin shows there."""
    kinds = {as_yaml(replace(config, seed=0, threads=0)): config for config in configs}
    works: dict[str, Work] = {}
    for config in kinds.values():
        settings = repr((config.benchmark, config.benchmark_settings))
        if settings not in works:
            works = {settings: work_of(config, data)}  # one at a time: data may be large
        works[settings].learner(config, RunFolder(Path()))


def _refuse_busy(folders: list[Path]) -> None:
    """Two sweeps at once must not take each other's runs for failures."""
    last = time.monotonic() + PATIENCE
    while busy := [path for path in folders if RunFolder(path).is_running()]:
        if time.monotonic() > last:
            raise RunError(
                f"another process is running {busy[0]}, perhaps this sweep: wait for it, or use another --out"
            )
        time.sleep(0.1)


def _jobs(configs: dict[Path, AnyConfig], options: Options) -> tuple[int, list[Job]]:
    """How many runs at once, and each as a process with its share of the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = max((config.threads for config in configs.values()), default=0)
    at_once = options.jobs or max(1, min(len(configs), cores // asked if asked else cores))
    # On a cluster the cores of this machine say nothing.
    usual = 1 if options.ray else max(1, cores // at_once)
    places = ["--data", str(options.data.resolve())] if options.data else []
    places += [word for script in options.import_ for word in ("--import", str(Path(script).resolve()))]
    variables = {name: value for name, value in os.environ.items() if name.startswith("SGP_")}
    jobs = []
    for path, config in configs.items():
        config = replace(config, threads=config.threads or usual)
        words = [*shlex.split(as_command(config))[1:], "--out", str(path.parent), "--name", path.name, "--resume"]
        jobs.append(Job(path, (*words, *places), config.threads, variables))
    return at_once, jobs


def _run(jobs: list[Job], at_once: int, options: Options) -> Events:
    if options.ray is None or not jobs:
        return run_here(jobs, at_once)
    from sgp.experiments.cluster import run_on_ray

    return run_on_ray(jobs, options.ray, options.retries)


def _print_heading(console: Console, options: Options, sweep: Sweep, at_once: int, jobs: list[Job]) -> None:
    finished = len(sweep.points) - len(jobs)
    state = f", {finished} of them finished already" if finished else ""
    where = f"on Ray at {options.ray}" if options.ray else f"{at_once} at once"
    threads = "/".join(map(str, sorted({job.threads for job in jobs})))
    plan = f"; {where}, threads {threads} each" if jobs else ""
    _say(console, f"{options.file}: {len(sweep.points)} runs in {options.out}{state}{plan}")
    for note in sweep.notes:
        _say(console, note, "yellow")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "it has written nothing")


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
