"""A real Ray cluster on this machine, and a sweep on it that loses a worker."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.processes import lines
from experiments.small import run, trace
from waiting import wait_until

from sgp.experiments.config import configure
from sgp.experiments.folder import RunFolder

GRID = {"benchmark": "digits", "method": "sgp", "tasks": 2, "epochs": 160}
SEEDS = (0, 1)


@contextmanager
def start_cluster(workers: int = len(SEEDS)) -> Iterator[Any]:
    """Start a head that runs nothing, and workers with one core each."""
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 80 * 2**20}
    # A node that is gone is noticed after two seconds, not after a quarter of a minute.
    soon = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": soon} | small
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(workers):
            made.add_node(num_cpus=1, wait=False, **small)
        made.wait_for_nodes()
        yield made
    finally:
        made.shutdown()


def lose_worker(cluster: Any, folder: Path) -> int:
    """Run a sweep on a cluster, kill the worker of one of its runs, and check that all runs end with the same bits.

    Args:
        cluster: Cluster of `start_cluster`.
        folder: Folder of the sweep.

    Returns:
        Number of events of the run when its worker was killed.
    """
    grid = "".join(f"{name}: {value}\n" for name, value in GRID.items())
    (folder / "grid.yaml").write_text(f"{grid}seed: {list(SEEDS)}\n", encoding="utf-8")
    configs = [configure(**GRID, seed=seed, threads=1) for seed in SEEDS]  # type: ignore[arg-type]
    folders = [folder / "runs" / config.name for config in configs]
    command = [sys.executable, "-m", "sgp", "sweep", "grid.yaml", "--ray", cluster.address]
    with (folder / "output").open("w") as output:
        sweep = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    wait_until(lambda: all(lines(each) > 5 for each in folders) or sweep.poll() is not None)
    assert sweep.poll() is None, (folder / "output").read_text()

    # With its raylet a node is gone; what it had started must go with it, and so must the run.
    runner = find_runner(folders[0])
    raylet = find_parent(find_parent(runner))
    (node,) = [node for node in cluster.list_all_nodes() if node.all_processes["raylet"][0].process.pid == raylet]
    cluster.remove_node(node, allow_graceful=False)
    stat = Path(f"/proc/{runner}/stat")
    wait_until(lambda: not stat.exists() or stat.read_text().split()[2] == "Z")
    reached = lines(folders[0])

    for config in configs:
        run(folder / config.name, config)  # type: ignore[arg-type]
    assert 5 < reached < lines(folder / folders[0].name)
    wait_until(lambda: sweep.poll() is not None)
    said = (folder / "output").read_text()
    assert sweep.returncode == 0, said
    assert f"{len(SEEDS)} of {len(SEEDS)} runs are finished" in said
    assert "resuming after task" in (folders[0] / "output.log").read_text()
    for each in folders:
        assert trace(each) == trace(folder / each.name)
        assert not RunFolder(each).is_running()
    return reached


def find_runner(path: Path) -> int:
    """Return the process that executes a run: the one that has its lock open."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if any(os.readlink(file) == str(path / ".lock") for file in (process / "fd").iterdir()):
                    return int(process.name)
            except OSError:
                continue  # it has ended meanwhile
    raise AssertionError(f"no process runs {path}")


def find_parent(pid: int) -> int:
    """Return the parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
