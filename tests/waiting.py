"""Wait for conditions: a test ends when something has happened, however busy the machine is."""

import time
from collections.abc import Callable

# Seconds after which something that should happen is taken to never happen. No test gets near it unless it fails.
CEILING = 1800


def wait_until(condition: Callable[[], bool], interval: float = 0.01) -> None:
    """Return as soon as a condition holds, which is looked at every ``interval`` seconds."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() < begun + CEILING, "what the test waits for does not happen"
        time.sleep(interval)
