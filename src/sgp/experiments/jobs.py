"""Runs as processes on this machine."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, TimeoutExpired

# File in the run's folder with what `sgp run` would print.
LOG = "output.log"
# Variables of the libraries that torch and NumPy may have been built with.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Seconds between two polls of the processes.
PAUSE = 0.1
# Seconds after which a process that was asked to stop is killed.
PATIENCE = 10.0


@dataclass(frozen=True)
class Job:
    """Run in a process of its own.

    Attributes:
        folder: Folder of the run.
        arguments: Arguments of the command `sgp`.
        threads: Number of threads.
        variables: Environment variables beside those of this process.
    """

    folder: Path
    arguments: tuple[str, ...]
    threads: int
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def log(self) -> Path:
        """File with the output of the process."""
        return self.folder / LOG

    def start(self) -> Popen[bytes]:
        """Start a process that ends when this one does, since it watches its standard input."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "sgp.experiments.tether", *self.arguments]
        environment = os.environ | dict.fromkeys(THREADS, str(self.threads)) | dict(self.variables)
        with self.log.open("ab") as log:
            # In its own session, so that Ctrl-C at the terminal reaches only this process.
            return Popen(command, stdin=PIPE, stdout=log, stderr=STDOUT, env=environment, start_new_session=True)


Events = Generator[tuple[Job, int | None], None, None]
"""Each job twice: with None when it starts, and with its exit status when it has ended."""


def run_here(jobs: Sequence[Job], parallel: int) -> Events:
    """Run jobs on this machine. Jobs that still run when the generator is closed are stopped.

    Args:
        jobs: Jobs to run.
        parallel: Number of jobs to run in parallel.
    """
    waiting, running = deque(jobs), dict[int, tuple[Job, Popen[bytes]]]()
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                job = waiting.popleft()
                process = job.start()
                running[process.pid] = job, process
                yield job, None
            for pid, (job, process) in list(running.items()):
                if process.poll() is not None:
                    del running[pid]
                    yield job, end(process)
            time.sleep(PAUSE)
    finally:
        stop([process for _, process in running.values()])


def stop(processes: Sequence[Popen[bytes]]) -> None:
    """Terminate processes, and kill those that do not end."""
    for process in processes:
        process.terminate()
    last = time.monotonic() + PATIENCE
    for process in processes:
        try:
            process.wait(max(0.0, last - time.monotonic()))
        except TimeoutExpired:
            process.kill()
        end(process)


def end(process: Popen[bytes]) -> int:
    """Wait for a process and return its exit status."""
    with process:
        return process.wait()
