"""5-datasets: CIFAR-10, MNIST, SVHN, FashionMNIST and notMNIST, one task each, in this order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from sgp.benchmarks import settings as check
from sgp.benchmarks.benchmark import Benchmark
from sgp.benchmarks.datasets import cifar, idx, notmnist, svhn
from sgp.benchmarks.datasets.images import ImageSet, find
from sgp.benchmarks.stream import Examples, Stream, Task, hold_out

CLASSES = 10
SIDE = 32
# Mean and deviation of the published code, for pixels in [0, 1]; one number is for all three channels.
SCALES = {
    "CIFAR-10": ((125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255)),
    "MNIST": ((0.1,), (0.2752,)),
    "SVHN": ((0.4377, 0.4438, 0.4728), (0.198, 0.201, 0.197)),
    "FashionMNIST": ((0.2190,), (0.3318,)),
    "notMNIST": ((0.4254,), (0.4501,)),
}
TASKS = len(SCALES)


@dataclass(frozen=True)
class FiveDatasets:
    """Five data sets of ten classes, one after another: CIFAR-10, MNIST, SVHN, FashionMNIST, notMNIST."""

    tasks: int = TASKS
    """How many of the five to learn, from 1 to 5."""
    fashion: Literal["fashion", "digits"] = "fashion"
    """fashion: the fourth task is FashionMNIST; digits: MNIST again, which the published code fetches in its place."""
    validation: float = 0.05
    """Share of each task's training images that is held out for validation, in [0, 1)."""
    validation_seed: int | None = 1
    """Draws the validation images; none: the run's seed. The published code always has 1 here."""

    def __post_init__(self) -> None:
        check.in_range("tasks", self.tasks, 1, TASKS)
        check.one_of("fashion", self.fashion, ("fashion", "digits"))
        check.share("validation", self.validation)
        check.seed("validation_seed", self.validation_seed)


def shape(settings: FiveDatasets) -> tuple[tuple[int, ...], list[int]]:
    """Of one image, and the number of classes of each head."""
    return (3, SIDE, SIDE), [CLASSES] * settings.tasks


def stream(settings: FiveDatasets, data: Path | None, seed: int) -> Stream:
    """The tasks, from the published files in the folder."""
    names = list(SCALES)[: settings.tasks]
    # All at once: a data set that is missing should not be found out hours later.
    sets = [_read(name, settings, data) for name in names]
    held_by = seed if settings.validation_seed is None else settings.validation_seed

    def make(index: int) -> Task:
        name, images = names[index], sets[index]
        prepare = partial(normalised, name=name)
        whole = Examples(images.train, images.train_labels, prepare)
        train, validation = hold_out(whole, settings.validation, held_by)
        return Task(name, index, train, validation, Examples(images.test, images.test_labels, prepare))

    return Stream(names, *shape(settings), make)


def _read(name: str, settings: FiveDatasets, data: Path | None) -> ImageSet:
    match name:
        case "CIFAR-10":
            return cifar.read(find(data, cifar.CIFAR10.name), cifar.CIFAR10)
        case "SVHN":
            return svhn.read(find(data, svhn.NAME))
        case "notMNIST":
            return notmnist.read(find(data, notmnist.NAME))
        case "FashionMNIST" if settings.fashion == "fashion":
            return idx.read(find(data, idx.FASHION.name), idx.FASHION)
        case _:
            return idx.read(find(data, idx.MNIST.name), idx.MNIST)


def normalised(images: Tensor, name: str) -> Tensor:
    """Images as the network takes them: [n, 3, 32, 32], with black around smaller ones and grey in three channels."""
    margin = (SIDE - images.shape[-1]) // 2
    mean, deviation = (torch.tensor(numbers).view(-1, 1, 1) for numbers in SCALES[name])
    scaled = (F.pad(images, (margin,) * 4).float() / 255 - mean) / deviation
    return scaled.expand(-1, 3, -1, -1)


BENCHMARK = Benchmark(
    name="five-datasets",
    description="CIFAR-10, MNIST, SVHN, FashionMNIST and notMNIST, one task each.",
    settings=FiveDatasets,
    stream=stream,
    shape=shape,
    network="resnet18",
    datasets=(cifar.CIFAR10.name, idx.MNIST.name, svhn.NAME, idx.FASHION.name, notmnist.NAME),
)
