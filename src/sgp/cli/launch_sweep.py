"""Run a sweep: each run in a process of its own, on this machine or on Ray."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from sgp.cli.arguments import exit_on
from sgp.cli.interrupt import INTERRUPTED, raise_on_interrupt
from sgp.cli.launch import build_trainer, exit_on_failure, load_stream
from sgp.cli.sweep import Options
from sgp.cli.sweep_display import SweepDisplay, describe_status, print_outcome
from sgp.experiments.config import Config, as_command, find_differences
from sgp.experiments.folder import CONFIG, RunError, RunFolder
from sgp.experiments.jobs import THREADS, Events, Job, run_here
from sgp.experiments.summary import read_outcome
from sgp.experiments.sweep import Sweep

# For the processes of a sweep that was killed to end, in seconds.
PATIENCE = 10.0


def launch_sweep(sweep: Sweep, options: Options, resume: str) -> int:
    """Run the runs of a sweep that are not finished, and return the exit code.

    Args:
        sweep: Runs of the sweep.
        options: Options of the command.
        resume: Command that resumes the sweep.
    """
    raise_on_interrupt()
    console = Console()
    with exit_on_failure():
        # Absolute, so that it is the same on all nodes of a cluster.
        folders = {options.out.absolute() / point.name: point for point in sweep.points}
        configs = {path: _match_folder(path, point.config) for path, point in folders.items()}
        left = {path: config for path, config in configs.items() if read_outcome(path) is None}
        if not options.plan:
            _check_runs(left, options.data)
            _wait_for_folders(list(left))
    parallel, jobs = _plan_jobs(left, options)
    _print_heading(console, options, sweep, parallel, jobs)
    if options.plan:
        for job in jobs:
            print(shlex.join(["sgp", *job.arguments]))
        return 0
    # A batch system sends SIGTERM before it ends a job.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with (
            exit_on_failure(),
            exit_on(OSError, code=1),
            SweepDisplay(console, left) as display,
            closing(_start(jobs, parallel, options)) as events,
        ):
            failed = {job: status for job, status in display.follow(events) if status}
    except KeyboardInterrupt:
        finished = sum(read_outcome(path) is not None for path in folders)
        _print(console, f"Stopped with {finished} of {len(folders)} runs finished; resume with: {resume}")
        return INTERRUPTED
    print_outcome(console, [(point, path) for path, point in folders.items()])
    _print(console, f"{len(folders) - len(failed)} of {len(folders)} runs are finished, in {options.out}")
    _print_failures(console, failed, options, resume)
    return 1 if failed else 0


def _print_failures(console: Console, failed: dict[Job, int], options: Options, resume: str) -> None:
    for job, status in failed.items():
        _print(console, f"failed: {job.folder.name}, {describe_status(status)}", "red")
        _print(console, f"  {_find_last_line(job.log)}")
        _print(console, f"  its output is in {options.out / job.folder.name / job.log.name}")
    if failed:
        _print(console, f"try the failed runs again with: {resume}")


def _match_folder(path: Path, config: Config[Any]) -> Config[Any]:
    """Return the config of a run, with the number of threads that its folder has if it was started before.

    Raises:
        RunError: The folder has a run of another config.
    """
    if not (path / CONFIG).exists():
        return config
    known = RunFolder(path).read_config()
    config = replace(config, threads=config.threads or known.threads)
    other = list(find_differences(config, known))
    if other:
        raise RunError(f"{path} is a run with other settings ({'; '.join(other)}): use another --out")
    return config


def _check_runs(configs: Mapping[Path, Config[Any]], data: Path | None) -> None:
    """Load the data of each benchmark and build each kind of model once, so that mistakes stop the sweep at its start.

    Raises:
        ValueError: The method, the network and the tasks of a run do not go together.
    """
    benchmarks: dict[str, list[Path]] = {}
    for path, config in configs.items():
        benchmarks.setdefault(repr((config.benchmark, config.benchmark_settings)), []).append(path)
    checked = set()
    for paths in benchmarks.values():
        stream = load_stream(configs[paths[0]], data)
        for path in paths:
            config = replace(configs[path], device="cpu")  # the machines of a cluster may have other devices
            if (kind := _describe_kind(config)) in checked:
                continue
            checked.add(kind)
            try:
                build_trainer(config, stream, RunFolder(path))
            except ValueError as error:
                raise ValueError(f"{path.name}: {error}") from error


def _describe_kind(config: Config[Any]) -> str:
    """Return the settings of a config without its numbers, on which it rarely depends whether a model can be built."""
    values = {name: sorted(value) if isinstance(value, dict) else value for name, value in config.flat().items()}
    return repr({name: type(value) if isinstance(value, int | float) else value for name, value in values.items()})


def _wait_for_folders(folders: list[Path]) -> None:
    """Wait until no other process runs in any folder, as that of a sweep that was just killed.

    Raises:
        RunError: Another process still runs, perhaps of the same sweep.
    """
    last = time.monotonic() + PATIENCE
    while busy := [path for path in folders if RunFolder(path).is_running()]:
        if time.monotonic() > last:
            raise RunError(
                f"another process is running {busy[0]}, perhaps this sweep: wait for it, or use another --out"
            )
        time.sleep(0.1)


def _plan_jobs(configs: dict[Path, Config[Any]], options: Options) -> tuple[int, list[Job]]:
    """Return the number of parallel runs, and each run as a process with its share of the cores.

    OMP_NUM_THREADS is the number of threads of each run, unless its config has one.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = _read_threads()
    widest = max((config.threads or threads or 1 for config in configs.values()), default=1)
    parallel = options.jobs or max(1, min(len(configs), cores // widest))
    # The cores of this machine say nothing about those of a cluster.
    usual = threads or (1 if options.ray else max(1, cores // parallel))
    places = ["--data", str(options.data.resolve())] if options.data else []
    places += [word for script in options.import_ for word in ("--import", str(Path(script).resolve()))]
    variables = {name: value for name, value in os.environ.items() if name.startswith("SGP_")}
    jobs = []
    for path, config in configs.items():
        config = replace(config, threads=config.threads or usual)
        words = [*shlex.split(as_command(config))[1:], "--out", str(path.parent), "--name", path.name, "--resume"]
        jobs.append(Job(path, (*words, *places), config.threads, variables))
    return parallel, jobs


def _read_threads() -> int | None:
    """Return the value of OMP_NUM_THREADS; None if it is not set to a positive number."""
    first = os.environ.get(THREADS[0], "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def _start(jobs: list[Job], parallel: int, options: Options) -> Events:
    if options.ray is None or not jobs:
        return run_here(jobs, parallel)
    from sgp.experiments.cluster import run_on_ray

    return run_on_ray(jobs, options.ray, options.retries)


def _print_heading(console: Console, options: Options, sweep: Sweep, parallel: int, jobs: list[Job]) -> None:
    finished = len(sweep.points) - len(jobs)
    state = f", {finished} of them already finished" if finished else ""
    where = f"on Ray at {options.ray}" if options.ray else f"{parallel} in parallel"
    threads = "/".join(map(str, sorted({job.threads for job in jobs})))
    plan = f"; {where}, threads {threads} each" if jobs else ""
    _print(console, f"{options.file}: {len(sweep.points)} runs in {options.out}{state}{plan}")
    for note in sweep.notes:
        _print(console, note, "yellow")


def _find_last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "it has no output")


def _print(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
