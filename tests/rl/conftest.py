"""Games need the extras; without them there is nothing to collect here."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

NEEDED = ("gymnasium", "ale_py", "stable_baselines3", "yaml")
collect_ignore_glob = [] if all(map(find_spec, NEEDED)) else ["test_*.py"]


@pytest.fixture(autouse=True)
def _signs() -> Iterator[None]:
    """The tests' own benchmark is there while they run, and no longer."""
    from rl import signs

    from sgp.benchmarks import BENCHMARKS

    BENCHMARKS._known["signs"] = signs.BENCHMARK
    yield
    BENCHMARKS._known.pop("signs", None)
