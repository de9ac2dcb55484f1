"""Fill the disk while a memory or a run is saved; nothing may be lost, and the error must name the path."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from data.make_memory import inputs, memory_of, network
from experiments.small import trace

import sgp
from bench.soak.calls import call

SIZE = 8 * 2**20
SAVES, RUNS = 100, 20
QUICK_SHARE = 10
RUN = ["run", "digits", "--kind", "split", "--tasks", "3", "--epochs", "2", "--threads", "1"]
# Function that limits the free space to a number of bytes inside the context.
Limit = Callable[[int], AbstractContextManager[None]]


def run(folder: Path, *, quick: bool, seed: int) -> dict[str, Any]:
    """Save memories and runs on a disk with little free space.

    Args:
        folder: Empty folder.
        quick: Whether to save a few times only.
        seed: Seed that draws the free space.

    Returns:
        Figures of the campaign.
    """
    share = QUICK_SHARE if quick else 1
    generator = random.Random(seed)
    faults: list[str] = []
    with make_disk(folder / "disk") as (kind, limit):
        saves = fill_while_saving(folder / "disk", limit, SAVES // share, generator, faults)
        runs = fill_while_running(folder, limit, RUNS // share, generator, faults)
    return {"disk": kind, "memories": saves, "runs": runs, "faults": faults}


@contextmanager
def make_disk(place: Path) -> Iterator[tuple[str, Limit]]:
    """Mount a small disk, or limit the size of files where mounting is not allowed; yield the kind and the limit."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)]
    is_mounted = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
    if not is_mounted:
        yield "RLIMIT_FSIZE", _limit_files
        return
    try:
        yield "tmpfs", lambda room: _fill(place, room)
    finally:
        subprocess.run(["umount", str(place)], check=True)


@contextmanager
def _fill(place: Path, room: int) -> Iterator[None]:
    ballast = place / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass
    os.truncate(ballast, max(0, ballast.stat().st_size - room))
    try:
        yield
    finally:
        ballast.unlink()


@contextmanager
def _limit_files(room: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill_while_saving(
    disk: Path, limit: Limit, saves: int, generator: random.Random, faults: list[str]
) -> dict[str, int]:
    """Save a memory with random free space, and check that a failure leaves the old file and no other.

    Args:
        disk: Folder on the disk.
        limit: Function that limits the free space.
        saves: Number of saves.
        generator: Random numbers that draw the free space.
        faults: List to which faults are appended.

    Returns:
        Numbers of saves and of failures.
    """
    memory = memory_of(network())
    memory.update([inputs(0)])
    path = disk / "memory.safetensors"
    memory.save(path)
    failures = 0
    for number in range(saves):
        old = path.read_bytes()
        memory.update([inputs(number + 1)], allow_unattached=True)
        with limit(generator.randrange(2 * len(old))):
            try:
                memory.save(path)
            except OSError as error:
                failures += 1
                if str(path) not in str(error):
                    faults.append(f"save {number}: the error does not name the file: {error}")
                if path.read_bytes() != old:
                    faults.append(f"save {number}: the old file has changed")
        if {file.name for file in disk.iterdir()} != {path.name}:
            faults.append(f"save {number}: there is another file")
        memory.save(path)
        sgp.GradientMemory.from_file(memory.model, path)
    path.unlink()
    return {"saves": saves, "failures": failures}


def fill_while_running(
    folder: Path, limit: Limit, runs: int, generator: random.Random, faults: list[str]
) -> dict[str, int]:
    """Run with little free space, resume with more each time, and compare with an undisturbed run.

    Args:
        folder: Folder of the undisturbed run, with a folder ``disk``.
        limit: Function that limits the free space.
        runs: Number of runs.
        generator: Random numbers that draw the free space.
        faults: List to which faults are appended.

    Returns:
        Numbers of runs and of failures.
    """
    call([*RUN, "--out", str(folder), "--name", "whole"])
    whole = folder / "whole"
    size = sum(file.stat().st_size for file in whole.rglob("*") if file.is_file())
    failures = 0
    for number in range(runs):
        path = folder / "disk" / f"run{number}"
        again = [*RUN, "--out", str(path.parent), "--name", path.name, "--resume"]
        for room in sorted(generator.randrange(2 * size) for _ in range(3)):
            with limit(room):
                outcome = call(again)
            failures += not outcome.is_accepted
            if outcome.fault or (not outcome.is_accepted and str(path) not in outcome.message):
                faults.append(f"run {number} with {room} bytes: {outcome.fault or outcome.message}")
        last = call(again)
        if not last.is_accepted or trace(path) != trace(whole):
            faults.append(f"run {number}: differs after the failures: {last.fault or last.message}")
        shutil.rmtree(path, ignore_errors=True)
    return {"runs": runs, "failures": failures}
