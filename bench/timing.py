"""Times of several ways to do the same thing, interleaved so that a busy machine slows all of them alike."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Times:
    """Seconds of each way in each round."""

    seconds: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        """Return the median time of one way."""
        return median(self.seconds[name])

    def ratio(self, name: str, to: str) -> float:
        """Return the median over rounds of the ratio of two ways' times in the same round."""
        return median(a / b for a, b in zip(self.seconds[name], self.seconds[to], strict=True))


def take_turns(
    ways: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    repeat: int = 1,
    warm: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Run every way once per round, A B C A B C ..., and keep its time.

    Each turn calls the way `warm` times untimed, so that it finds its own data in the caches as it does in
    a training loop, then `repeat` times timed; the turn's time is the mean of these. With `time.process_time` as
    `clock`, the time of one thread does not depend on what else the machine does.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            for _ in range(warm):
                run()
            start = clock()
            for _ in range(repeat):
                run()
            seconds[name].append((clock() - start) / repeat)
    return Times(seconds)
