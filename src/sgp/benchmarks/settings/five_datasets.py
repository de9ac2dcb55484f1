"""Settings of the benchmark five-datasets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.benchmarks.benchmark import Benchmark
from sgp.lazy import Deferred
from sgp.settings import MAX_SEED, Settings, setting

TASKS = 5
CLASSES = 10
SIDE = 32


@dataclass(frozen=True)
class FiveDatasets(Settings):
    """Five data sets of ten classes, one after another: CIFAR-10, MNIST, SVHN, FashionMNIST, notMNIST."""

    tasks: int = setting(TASKS, low=1, high=TASKS)
    """Number of tasks to learn."""
    fashion: Literal["fashion", "digits"] = "fashion"
    """Data of the fourth task. fashion: FashionMNIST; digits: MNIST again, which the published code reads instead."""
    validation: float = setting(0.05, low=0, below=1)
    """Fraction of each task's training images to hold out for validation."""
    validation_seed: int | None = setting(1, low=0, high=MAX_SEED)
    """Seed that draws the validation images; none: the run's seed. The published code uses 1."""


def get_shape(settings: FiveDatasets) -> tuple[tuple[int, ...], list[int]]:
    """Return the shape of one image and the number of classes of each head."""
    return (3, SIDE, SIDE), [CLASSES] * settings.tasks


BENCHMARK = Benchmark(
    name="five-datasets",
    description="CIFAR-10, MNIST, SVHN, FashionMNIST and notMNIST, one task each.",
    settings=FiveDatasets,
    stream=Deferred("sgp.benchmarks.five_datasets:load_stream"),
    shape=get_shape,
    network="resnet18",
    datasets=("cifar10", "mnist", "svhn", "fashion-mnist", "notmnist"),
)
