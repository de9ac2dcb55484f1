"""For all tests: no property fails by the clock, since a busy machine proves nothing, and nothing stays registered."""

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
    """What a test registers, by a file that it imports for instance, is gone after it."""
    kept = [(registry, dict(registry._known)) for registry in (BENCHMARKS, METHODS, NETWORKS)]
    yield
    for registry, known in kept:
        registry._known.clear()
        registry._known.update(known)
