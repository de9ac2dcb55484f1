"""Processes on this machine: so many at once, each with its threads, and none left behind."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from waiting import CEILING, wait_until

from sgp.experiments import jobs
from sgp.experiments.jobs import Job, run_here


@dataclass(frozen=True)
class Script(Job):
    """A job that runs its first argument as Python, which starts sooner than the command does."""

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", *self.arguments], stdin=subprocess.PIPE, cwd=self.folder)


WAIT = "import pathlib, time; pathlib.Path('{0}').touch()\nwhile not pathlib.Path('{1}').exists(): time.sleep(0.01)"


def test_each_job_begins_and_ends_with_its_status_whatever_the_others_do(tmp_path: Path) -> None:
    given = [Script(tmp_path, (f"raise SystemExit({status})",), 1) for status in (0, 3, 0, 1)]
    seen = list(run_here(given, parallel=2))
    assert sorted(status for _, status in seen if status is not None) == [0, 0, 1, 3]
    for job in given:
        statuses = [status for other, status in seen if other is job]
        assert statuses == [None, int(job.arguments[0][-2])]


def test_no_more_than_so_many_run_in_parallel(tmp_path: Path) -> None:
    running = most = 0
    for _, status in run_here([Script(tmp_path, (f"# {number}",), 1) for number in range(5)], parallel=2):
        running += 1 if status is None else -1
        most = max(most, running)
    assert most == 2


def test_closing_stops_what_runs_and_begins_nothing_more(tmp_path: Path) -> None:
    names = ("a", "b", "c")
    events = run_here([Script(tmp_path, (WAIT.format(name, "never"),), 1) for name in names], parallel=2)
    next(events)
    next(events)
    wait_until(lambda: all((tmp_path / name).exists() for name in ("a", "b")))
    events.close()
    assert not (tmp_path / "c").exists()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_what_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PATIENCE", 0.2)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT.format("deaf", "never")
    events = run_here([Script(tmp_path, (deaf,), 1)], parallel=1)
    next(events)
    wait_until(lambda: (tmp_path / "deaf").exists())
    events.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_process_has_its_threads_its_variables_and_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that is started is echoed by a shell in the interpreter's place."""
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\necho "$@" $OMP_NUM_THREADS $MKL_NUM_THREADS $SGP_DATA; echo wrong >&2; exit 5\n')
    shell.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(shell))
    job = Job(tmp_path / "runs" / "one", ("run", "digits"), 3, {"SGP_DATA": "there"})
    assert [status for _, status in run_here([job], parallel=1)] == [None, 5]
    assert list(run_here([job], parallel=1))[-1] == (job, 5)
    line = "-m sgp.experiments.tether run digits 3 3 there\nwrong\n"
    assert job.log.read_text() == 2 * line  # what was written before is kept


@pytest.mark.slow
def test_a_process_ends_when_the_one_that_started_it_is_gone() -> None:
    """Its standard input is closed then. Here the command would go on for hours."""
    code = (
        "import sys, time; sys.modules['sgp.cli'] = m = type(sys)('sgp.cli')\n"
        "m.main = lambda: (print('ready', flush=True), time.sleep(9999))"
    )
    command = f"{code}\nimport runpy; runpy.run_module('sgp.experiments.tether', run_name='__main__')"
    process = subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    assert process.poll() is None
    process.communicate(timeout=CEILING)
    assert process.returncode == 130
