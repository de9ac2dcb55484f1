"""5-datasets: CIFAR-10, MNIST, SVHN, FashionMNIST and notMNIST, one task each, in this order."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from sgp.benchmarks.datasets import cifar, idx, notmnist, svhn
from sgp.benchmarks.datasets.images import ImageSet, find
from sgp.benchmarks.settings.five_datasets import SIDE, FiveDatasets, shape
from sgp.benchmarks.stream import Examples, Stream, Task, hold_out

# Mean and deviation of the published code, for pixels in [0, 1]; one number is for all three channels.
SCALES = {
    "CIFAR-10": ((125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255)),
    "MNIST": ((0.1,), (0.2752,)),
    "SVHN": ((0.4377, 0.4438, 0.4728), (0.198, 0.201, 0.197)),
    "FashionMNIST": ((0.2190,), (0.3318,)),
    "notMNIST": ((0.4254,), (0.4501,)),
}


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
