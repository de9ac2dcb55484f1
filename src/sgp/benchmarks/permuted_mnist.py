"""Permuted MNIST: all ten digits in each task, with the pixels in another fixed order, and one head for all tasks.

In the published code of GPM, task i of ten has the order of ``sklearn.utils.shuffle`` with the random state 100 r + i,
where r is the i-th of the numbers 0..9, shuffled with the run's seed. This module does the same. But the published code
caches the images of its first run in files that are named by r, and every later run reads these, whatever its seed: the
tasks of the first run in another order. Here every seed has tasks of its own.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sgp.benchmarks.datasets import idx
from sgp.benchmarks.datasets.images import find_data_folder
from sgp.benchmarks.settings import PermutedMNIST
from sgp.benchmarks.stream import Examples, Stream, Task, normalize

MEAN, DEVIATION = 0.1307, 0.3081


def load_stream(settings: PermutedMNIST, data: Path | None, seed: int) -> Stream:
    """Load the tasks from the published files."""
    images = idx.read(find_data_folder(data, idx.MNIST.name), idx.MNIST)
    orders = draw_pixel_orders(settings.tasks, images.train[0].numel(), seed)
    count = int(settings.validation * len(images.train))
    prepare = partial(normalize, mean=MEAN, deviation=DEVIATION)

    def make(index: int) -> Task:
        train, test = (
            Examples(pixels.flatten(1)[:, orders[index]], labels, prepare)
            for pixels, labels in ((images.train, images.train_labels), (images.test, images.test_labels))
        )
        return Task(names[index], 0, train[count:], train[:count], test)

    names = [f"permutation {index}" for index in range(settings.tasks)]
    return Stream(names, *settings.get_shape(), make)


def draw_pixel_orders(tasks: int, pixels: int, seed: int) -> list[Tensor]:
    """Draw the order of pixels of each task, as the docstring of the module says."""
    # Fewer than ten tasks are the first of ten.
    numbers = np.arange(max(tasks, 10))
    np.random.RandomState(seed).shuffle(numbers)
    # A permutation is a shuffled range, drawn in the same way.
    return [
        torch.from_numpy(np.random.RandomState(100 * int(numbers[index]) + index).permutation(pixels))
        for index in range(tasks)
    ]
