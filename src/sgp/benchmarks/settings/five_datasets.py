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
    """How many of the five to learn."""
    fashion: Literal["fashion", "digits"] = "fashion"
    """fashion: the fourth task is FashionMNIST; digits: MNIST again, which the published code fetches in its place."""
    validation: float = setting(0.05, low=0, below=1)
    """Share of each task's training images that is held out for validation."""
    validation_seed: int | None = setting(1, low=0, high=MAX_SEED)
    """Draws the validation images; none: the run's seed. The published code always has 1 here."""


def shape(settings: FiveDatasets) -> tuple[tuple[int, ...], list[int]]:
    """Of one image, and the number of classes of each head."""
    return (3, SIDE, SIDE), [CLASSES] * settings.tasks


BENCHMARK = Benchmark(
    name="five-datasets",
    description="CIFAR-10, MNIST, SVHN, FashionMNIST and notMNIST, one task each.",
    settings=FiveDatasets,
    stream=Deferred("sgp.benchmarks.five_datasets:stream"),
    shape=shape,
    network="resnet18",
    datasets=("cifar10", "mnist", "svhn", "fashion-mnist", "notmnist"),
)
