"""Runs on Ray: a real cluster of two workers, one of which is killed in the middle."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="the command needs PyYAML, of the extra 'benchmarks'")
pytest.importorskip("sklearn", reason="the command needs scikit-learn, of the extra 'benchmarks'")

from experiments.small import run, trace
from waiting import wait_until

from sgp.experiments.cluster import run_on_ray
from sgp.experiments.config import configure
from sgp.experiments.folder import RunError, RunFolder
from sgp.experiments.jobs import Job

SETTINGS: dict[str, Any] = {"tasks": 2, "epochs": 160, "threads": 1}
NAMES = ["digits-sgp-paper-seed0", "digits-sgp-paper-seed1"]


def lines(path: Path) -> int:
    metrics = path / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a head that runs nothing, and two workers with one core each."""
    pytest.importorskip("ray", reason="of the extra 'ray'")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    small = {"object_store_memory": 80 * 2**20}
    # A node that is gone is noticed after two seconds, not after a quarter of a minute.
    soon = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": soon} | small
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            made.add_node(num_cpus=1, wait=False, **small)
        made.wait_for_nodes()
        yield made
    finally:
        made.shutdown()


def runner_of(path: Path) -> int:
    """Return the process that executes a run: the one that has its lock open."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if any(os.readlink(file) == str(path / ".lock") for file in (process / "fd").iterdir()):
                    return int(process.name)
            except OSError:
                continue  # it has ended meanwhile
    raise AssertionError(f"nobody is at {path}")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="processes are found by /proc")
def test_nothing_is_lost_when_a_worker_is_killed_in_mid_run(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text("benchmark: digits\nmethod: sgp\nseed: [0, 1]\ntasks: 2\nepochs: 160\n")
    folders = [tmp_path / "runs" / name for name in NAMES]
    command = [sys.executable, "-m", "sgp", "sweep", "grid.yaml", "--ray", cluster.address]
    with (tmp_path / "output").open("w") as output:
        sweep = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT)
    wait_until(lambda: all(lines(folder) > 5 for folder in folders) or sweep.poll() is not None)
    assert sweep.poll() is None, (tmp_path / "output").read_text()

    # With its raylet a node is gone; what it had started must go with it, and so must the run.
    runner = runner_of(folders[0])
    raylet = parent_of(parent_of(runner))
    (node,) = [node for node in cluster.list_all_nodes() if node.all_processes["raylet"][0].process.pid == raylet]
    cluster.remove_node(node, allow_graceful=False)
    stat = Path(f"/proc/{runner}/stat")
    wait_until(lambda: not stat.exists() or stat.read_text().split()[2] == "Z")
    reached = lines(folders[0])

    for seed, name in enumerate(NAMES):
        run(tmp_path / name, configure("digits", "sgp", seed=seed, **SETTINGS))
    assert 5 < reached < lines(tmp_path / NAMES[0])
    wait_until(lambda: sweep.poll() is not None)
    said = (tmp_path / "output").read_text()
    assert sweep.returncode == 0, said
    assert "2 of 2 runs are finished" in said
    assert "resuming after task" in (folders[0] / "output.log").read_text()
    for folder in folders:
        assert trace(folder) == trace(tmp_path / folder.name)
        assert not RunFolder(folder).is_running()


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r'pip install "sgp-torch\[ray\]"'):
        next(run_on_ray([Job(tmp_path, (), 1)], "auto", 0))


def test_an_address_that_nobody_answers_at_is_told_at_once(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="of the extra 'ray'")
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    for address in (f"127.0.0.1:{free}", f"ray://127.0.0.1:{free}", "127.0.0.1:port"):
        with pytest.raises(RunError, match=f"there is no Ray cluster at '{address}'"):
            next(run_on_ray([Job(tmp_path, (), 1)], address, 0))
