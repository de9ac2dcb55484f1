"""Run the command in this process, in an empty folder and without the user's environment."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:  # the core alone cannot import it
    from sgp.experiments.jobs import Job


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SGP_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    handler, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    yield
    signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(threads)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Run jobs one after another in this process, which is faster, and return the jobs that ran."""
    from sgp.cli import main

    ran: list[Job] = []

    def run_in_turn(jobs: list[Job], parallel: int) -> Iterator[tuple[Job, int | None]]:
        for job in jobs:
            ran.append(job)
            yield job, None
            job.folder.mkdir(parents=True, exist_ok=True)
            with job.log.open("a") as log, pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "stdout", log)
                patch.setattr(sys, "stderr", log)
                status = main(list(job.arguments))
            yield job, status

    monkeypatch.setattr("sgp.cli.launch_sweep.run_here", run_in_turn)
    return ran
