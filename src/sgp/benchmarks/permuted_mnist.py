"""Permuted MNIST: all ten digits in each task, with the pixels in another fixed order, and one head for all tasks.

In the published code of GPM task i of ten has the order of ``sklearn.utils.shuffle`` with ``random_state = 100 r + i``,
where r is the i-th of the numbers 0..9, shuffled with the run's seed. Here it is the same. But the published code keeps
the images of its first run in files that are named by r, and every later run takes those, whatever its seed: the tasks
of the first run in another order. Here every seed has tasks of its own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sgp.benchmarks.datasets import idx
from sgp.benchmarks.datasets.images import find
from sgp.benchmarks.settings.permuted_mnist import TASKS, PermutedMNIST, shape
from sgp.benchmarks.stream import Examples, Stream, Task

MEAN, DEVIATION = 0.1307, 0.3081


def stream(settings: PermutedMNIST, data: Path | None, seed: int) -> Stream:
    """The tasks, from the published files in the folder."""
    images = idx.read(find(data, idx.MNIST.name), idx.MNIST)
    orders = pixel_orders(settings.tasks, images.train[0].numel(), seed)
    held = int(settings.validation * len(images.train))

    def part(pixels: Tensor, labels: Tensor, index: int) -> Examples:
        return Examples(pixels.flatten(1)[:, orders[index]], labels, normalised)

    def make(index: int) -> Task:
        whole = part(images.train, images.train_labels, index)
        test = part(images.test, images.test_labels, index)
        return Task(names[index], 0, whole[held:], whole[:held], test)

    names = [f"permutation {index}" for index in range(settings.tasks)]
    return Stream(names, *shape(settings), make)


def pixel_orders(tasks: int, pixels: int, seed: int) -> list[Tensor]:
    """The order of pixels of each task; see the top of this file."""
    # Fewer than ten tasks are the first ones of ten.
    numbers = np.arange(max(tasks, TASKS))
    np.random.RandomState(seed).shuffle(numbers)
    orders = []
    for index in range(tasks):
        order = np.arange(pixels)
        np.random.RandomState(100 * int(numbers[index]) + index).shuffle(order)
        orders.append(torch.from_numpy(order))
    return orders


def normalised(pixels: Tensor) -> Tensor:
    """In [0, 1], then standardised with the mean and deviation of MNIST."""
    return (pixels.float() / 255 - MEAN) / DEVIATION
