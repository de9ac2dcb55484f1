"""Settings of the benchmark permuted-mnist."""

from __future__ import annotations

from dataclasses import dataclass

from sgp.benchmarks.benchmark import Benchmark
from sgp.lazy import Deferred
from sgp.settings import Settings, setting

TASKS = 10
# As many orders of pixels can be asked for.
MAX_TASKS = 100
CLASSES = 10
PIXELS = 28 * 28


@dataclass(frozen=True)
class PermutedMNIST(Settings):
    """MNIST with the pixels in another order in each task."""

    tasks: int = setting(TASKS, low=1, high=MAX_TASKS)
    """Number of tasks to learn."""
    validation: float = setting(0.1, low=0, below=1)
    """Fraction of the training images, the first ones of the file, to hold out for validation."""


def get_shape(settings: PermutedMNIST) -> tuple[tuple[int, ...], list[int]]:
    """Return the shape of one image as a row, and the number of classes of each head."""
    return (PIXELS,), [CLASSES]


BENCHMARK = Benchmark(
    name="permuted-mnist",
    description="MNIST with the pixels in another order in each of ten tasks, one head for all.",
    settings=PermutedMNIST,
    stream=Deferred("sgp.benchmarks.permuted_mnist:load_stream"),
    shape=get_shape,
    network="mlp",
    datasets=("mnist",),
)
