"""The trainer of games needs the extras; without them its tests are not collected."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

NEEDED = ("gymnasium", "ale_py", "stable_baselines3", "yaml")
collect_ignore = [] if all(map(find_spec, NEEDED)) else ["test_ppo.py"]


@pytest.fixture
def signs() -> Iterator[None]:
    """Register a benchmark of games that is learned in seconds, as long as a test runs."""
    from rl import signs

    from sgp.benchmarks import BENCHMARKS

    BENCHMARKS._known["signs"] = signs.BENCHMARK
    yield
    BENCHMARKS._known.pop("signs", None)
