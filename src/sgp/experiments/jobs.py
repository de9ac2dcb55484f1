"""Runs as processes: how one is started, and how many are run on the cores of this machine."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, TimeoutExpired

# Where a run's process writes what `sgp run` would print, in the run's folder.
LOG = "output.log"
# Of the libraries that torch and numpy may have been built with.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Between two looks at the processes.
PAUSE = 0.1
# After which a process that was asked to stop is killed.
PATIENCE = 10.0


@dataclass(frozen=True)
class Job:
    """One run as a process of its own.

    Attributes:
        folder: of the run.
        arguments: of the command `sgp`.
        threads: how many it uses.
        variables: of its environment, beside those that are there.
    """

    folder: Path
    arguments: tuple[str, ...]
    threads: int
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def log(self) -> Path:
        """Read the output of the process."""
        return self.folder / LOG

    def start(self) -> Popen[bytes]:
        """Start a process that ends at the latest with this one; its standard input must stay open until then."""
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "sgp.experiments.tether", *self.arguments]
        environment = os.environ | dict.fromkeys(THREADS, str(self.threads)) | dict(self.variables)
        with self.log.open("ab") as log:
            # In a session of its own: a Ctrl-C at the terminal is for whoever started it.
            return Popen(command, stdin=PIPE, stdout=log, stderr=STDOUT, env=environment, start_new_session=True)


Events = Generator[tuple[Job, int | None], None, None]
"""Each job twice: when it begins, with None, and when it has ended, with its exit status."""


def run_here(jobs: Sequence[Job], at_once: int) -> Events:
    """Run jobs on this machine, so many at once; those that still run when the generator is closed are stopped."""
    waiting, running = deque(jobs), dict[int, tuple[Job, Popen[bytes]]]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
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
    """Ask processes to stop, and kill those that do not."""
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
    """Return the exit status of a process once it has ended."""
    with process:
        return process.wait()
