"""Fixtures of all tests: Hypothesis without deadlines, which a busy machine would miss, and registries as before."""

from collections.abc import Iterator

import hypothesis
import pytest

from sgp.benchmarks import BENCHMARKS
from sgp.methods import METHODS
from sgp.networks import NETWORKS

hypothesis.settings.register_profile("no clock", deadline=None)
hypothesis.settings.load_profile("no clock")


@pytest.fixture(autouse=True)
def _registries_as_before() -> Iterator[None]:
    """Remove what a test registers, for instance by a file that it imports."""
    kept = [(registry, dict(registry._known)) for registry in (BENCHMARKS, METHODS, NETWORKS)]
    yield
    for registry, known in kept:
        registry._known.clear()
        registry._known.update(known)
