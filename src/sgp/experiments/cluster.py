"""Runs on a Ray cluster whose nodes share a file system. Ray chooses the node of each run.

A run whose node dies is resumed on another node from the checkpoint in its folder, so nothing is copied between nodes.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from sgp.experiments.folder import RunError, RunFolder
from sgp.experiments.jobs import Events, Job, stop

# Seconds between two polls of the runs.
PAUSE = 1.0
# Seconds to wait for a process of a dead node to end.
PATIENCE = 30.0
# Seconds to wait for a cluster to answer.
ANSWER = 10.0
KILLED = -9


class Killed(Exception):  # noqa: N818 (the run itself has no error)
    """A run's process was ended by a signal, for example because the machine is out of memory."""


def run_on_ray(jobs: Sequence[Job], address: str, retries: int) -> Events:
    """Run jobs on a cluster. Jobs that still run when the generator is closed are stopped.

    Args:
        jobs: Jobs whose paths are the same on all nodes.
        address: Address of the cluster; "auto" finds the one of this machine, "local" starts a temporary one.
        retries: How often a run is resumed whose node or process was killed.

    Raises:
        ImportError: Ray is not installed.
        RunError: There is no cluster at the address, or a job needs more cores than any of its nodes has.
    """
    ray = _connect(address)
    try:
        _check_sizes(ray, jobs)
        run, again = ray.remote(_run), {"max_retries": retries, "retry_exceptions": [Killed]}
        pending = {run.options(num_cpus=job.threads, name=job.folder.name, **again).remote(job): job for job in jobs}
        # Ray does not report which jobs have started, but their logs grow.
        waiting = {job: _size(job) for job in jobs}
        try:
            while pending:
                ended, _ = ray.wait(list(pending), timeout=PAUSE)
                for job in [job for job, size in waiting.items() if _size(job) > size]:
                    del waiting[job]
                    yield job, None
                for reference in ended:
                    job = pending.pop(reference)
                    if waiting.pop(job, None) is not None:
                        yield job, None
                    yield job, _status(ray, reference, job)
        finally:
            for reference in pending:
                ray.cancel(reference, force=True)
    finally:
        ray.shutdown()


def _connect(address: str) -> Any:
    """Connect to a cluster and return the module ray."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # this is the user's machine
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ImportError('this needs Ray: pip install "sgp-torch[ray]"', name="ray") from error
    try:
        # Ray itself would retry for minutes.
        host, colon, port = address.removeprefix("ray://").rpartition(":")
        if colon:
            socket.create_connection((host, int(port)), timeout=ANSWER).close()
    except (OSError, ValueError) as error:
        raise RunError(f"there is no Ray cluster at {address!r}: {error}") from error
    # The dashboard option applies only to a cluster that is started here.
    own: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **own)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RunError(f"there is no Ray cluster at {address!r}: {str(error).splitlines()[0]}") from error
    return ray


def _check_sizes(ray: Any, jobs: Sequence[Job]) -> None:
    """Raise if a job needs more cores than any node has, for which Ray would wait forever."""
    most = max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
    wanted = max(job.threads for job in jobs)
    if wanted > most:
        raise RunError(f"runs with threads: {wanted} need nodes of as many cores, and the largest here has {most:.0f}")


def _run(job: Job) -> int:
    """Run a job on a node, and return its exit status."""
    last = time.monotonic() + PATIENCE
    while RunFolder(job.folder).is_running() and time.monotonic() < last:
        time.sleep(PAUSE)
    process = job.start()
    try:
        process.wait()
    finally:
        stop([process])
    if process.returncode < 0:
        raise Killed(f"ended by signal {-process.returncode}")
    return process.returncode


def _status(ray: Any, reference: object, job: Job) -> int:
    """Return the exit status of a job. An error of Ray is written to the job's log."""
    try:
        status: int = ray.get(reference)
    except ray.exceptions.RayError as error:
        job.folder.mkdir(parents=True, exist_ok=True)
        with job.log.open("a", encoding="utf-8") as log:
            log.write(f"{error}\n")
        lost = isinstance(error, Killed | ray.exceptions.WorkerCrashedError | ray.exceptions.NodeDiedError)
        return KILLED if lost else 1
    return status


def _size(job: Job) -> int:
    return job.log.stat().st_size if job.log.exists() else 0
