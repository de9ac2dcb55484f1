"""Tests of games are collected only if the extras are installed."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

NEEDED = ("gymnasium", "ale_py", "stable_baselines3", "yaml")
collect_ignore_glob = [] if all(map(find_spec, NEEDED)) else ["test_*.py"]


@pytest.fixture(autouse=True)
def _signs() -> Iterator[None]:
    """Register the benchmark of the tests while they run."""
    from rl import signs

    from sgp.benchmarks import BENCHMARKS

    BENCHMARKS._known["signs"] = signs.BENCHMARK
    yield
    BENCHMARKS._known.pop("signs", None)
