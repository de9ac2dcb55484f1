"""5-datasets: CIFAR-10, MNIST, SVHN, FashionMNIST and notMNIST, one task each, in this order."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from sgp.benchmarks.datasets import cifar, idx, notmnist, svhn
from sgp.benchmarks.datasets.images import ImageSet, find_data_folder
from sgp.benchmarks.settings import FiveDatasets
from sgp.benchmarks.stream import Examples, Stream, Task, make_task, normalize

SIDE = 32
# Mean and deviation of the published code, for pixels in [0, 1]; a single number is for all three channels.
SCALES = {
    "CIFAR-10": ((125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255)),
    "MNIST": ((0.1,), (0.2752,)),
    "SVHN": ((0.4377, 0.4438, 0.4728), (0.198, 0.201, 0.197)),
    "FashionMNIST": ((0.2190,), (0.3318,)),
    "notMNIST": ((0.4254,), (0.4501,)),
}


def load_stream(settings: FiveDatasets, data: Path | None, seed: int) -> Stream:
    """Load the tasks from the published files."""
    names = list(SCALES)[: settings.tasks]
    # All at once, so that a missing data set is reported now and not hours later.
    sets = [_read(name, settings, data) for name in names]

    def make(index: int) -> Task:
        images, prepare = sets[index], partial(prepare_images, name=names[index])
        train = Examples(images.train, images.train_labels, prepare)
        test = Examples(images.test, images.test_labels, prepare)
        return make_task(names[index], index, train, test, settings, seed)

    return Stream(names, *settings.get_shape(), make)


def _read(name: str, settings: FiveDatasets, data: Path | None) -> ImageSet:
    match name:
        case "CIFAR-10":
            return cifar.read(find_data_folder(data, cifar.CIFAR10.name), cifar.CIFAR10)
        case "SVHN":
            return svhn.read(find_data_folder(data, svhn.NAME))
        case "notMNIST":
            return notmnist.read(find_data_folder(data, notmnist.NAME))
    form = idx.FASHION if name == "FashionMNIST" and settings.fashion == "fashion" else idx.MNIST
    return idx.read(find_data_folder(data, form.name), form)


def prepare_images(images: Tensor, name: str) -> Tensor:
    """Standardize images and convert them to [n, 3, 32, 32]: smaller ones are padded, grey ones are repeated."""
    margin = (SIDE - images.shape[-1]) // 2
    mean, deviation = (torch.tensor(numbers).view(-1, 1, 1) for numbers in SCALES[name])
    return normalize(F.pad(images, (margin,) * 4), mean, deviation).expand(-1, 3, -1, -1)
