"""Runs on Ray: a real cluster of two workers, one of which is killed in the middle."""

import socket
import sys
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="the command needs PyYAML, of the extra 'benchmarks'")
pytest.importorskip("sklearn", reason="the command needs scikit-learn, of the extra 'benchmarks'")

from experiments.ray_cluster import lose_worker, start_cluster

from sgp.experiments.cluster import run_on_ray
from sgp.experiments.folder import RunError
from sgp.experiments.jobs import Job


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="processes are found by /proc")
def test_nothing_is_lost_when_a_worker_is_killed_in_mid_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="of the extra 'ray'")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with start_cluster() as cluster:
        lose_worker(cluster, tmp_path)


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
