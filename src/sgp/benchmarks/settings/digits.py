"""Settings of the benchmark digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.benchmarks.benchmark import Benchmark
from sgp.lazy import Deferred
from sgp.settings import MAX_SEED, Settings, setting

PIXELS = 64
CLASSES = 10


@dataclass(frozen=True)
class Digits(Settings):
    """Handwritten digits of 8 x 8 pixels; they need no download."""

    kind: Literal["permuted", "split"] = "permuted"
    """Kind of tasks. permuted: all digits, with the pixels in a new order, and one head; split: two digits and a head
    for each task."""
    tasks: int = setting(10, low=1)
    """Number of tasks to learn; split digits have at most 5."""
    validation: float = setting(0.1, low=0, below=1)
    """Fraction of each task's training images to hold out for validation."""
    validation_seed: int | None = setting(None, low=0, high=MAX_SEED)
    """Seed that draws the validation images; none: the run's seed."""


def shape(settings: Digits) -> tuple[tuple[int, ...], list[int]]:
    """Return the shape of one image as a row, and the number of classes of each head."""
    return (PIXELS,), [CLASSES] if settings.kind == "permuted" else [2] * min(settings.tasks, CLASSES // 2)


BENCHMARK = Benchmark(
    name="digits",
    description="Handwritten digits of 8 x 8 pixels, permuted or split; needs no download and takes a minute.",
    settings=Digits,
    stream=Deferred("sgp.benchmarks.digits:load_stream"),
    shape=shape,
    network="mlp",
    datasets=(),
)
