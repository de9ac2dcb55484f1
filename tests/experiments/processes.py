"""Runs in processes that can be killed."""

import multiprocessing
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.small import in_this_process
from waiting import CEILING, wait_until

# New processes are forked from one that has imported everything, so that many can be started and killed.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["sgp.cli.launch", "sgp.experiments.ppo", "sklearn.datasets", "torch._dynamo"])


class Child:
    """A process that runs a function, until it ends or is killed."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self.process = SERVER.Process(target=target, args=arguments)
        self.process.start()

    def kill(self, when: Callable[[], bool]) -> bool:
        """Kill the process as soon as a condition holds; return whether it was still running then."""
        wait_until(lambda: when() or not self.process.is_alive(), interval=0.0005)
        self.process.kill()
        return self.end() == -signal.SIGKILL

    def end(self) -> int:
        self.process.join(CEILING)
        assert self.process.exitcode is not None
        return self.process.exitcode


def run_command(arguments: list[str]) -> int:
    """Run the command in a process of its own and return its exit status."""
    return Child(in_this_process, arguments).end()


def command(path: Path, *more: str) -> list[str]:
    return ["run", *more, "--out", str(path.parent), "--name", path.name, "--threads", "1"]


def lines(path: Path) -> int:
    """How many events a run has written down, of which the last may be torn."""
    metrics = path / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0
