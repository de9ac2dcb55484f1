"""Settings of the benchmark digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.benchmarks.benchmark import Benchmark
from sgp.lazy import Deferred
from sgp.settings import MAX_SEED, Settings, setting


@dataclass(frozen=True)
class Digits(Settings):
    """Handwritten digits of 8 x 8 pixels; they need no download."""

    kind: Literal["permuted", "split"] = "permuted"
    """permuted: all digits in each task, in a new order of pixels, one head; split: two digits and a head for each."""
    tasks: int = setting(10, low=1)
    """How many tasks to learn in a row; split digits have 5, and all are learned if more are asked for."""
    validation: float = setting(0.1, low=0, below=1)
    """Share of each task's training images that is held out for validation."""
    validation_seed: int | None = setting(None, low=0, high=MAX_SEED)
    """Draws the validation images; none: the run's seed."""


BENCHMARK = Benchmark(
    name="digits",
    description="Handwritten digits of 8 x 8 pixels, permuted or split; needs no download and takes a minute.",
    settings=Digits,
    stream=Deferred("sgp.benchmarks.digits:stream"),
    network="mlp",
    datasets=(),
)
