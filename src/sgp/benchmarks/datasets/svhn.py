"""SVHN, cropped digits, in the published files of MATLAB."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sgp.benchmarks.datasets.extra import need
from sgp.benchmarks.datasets.images import DamagedData, ImageSet, MissingData, check_counts, first_with

NAME = "svhn"
CLASSES = list("0123456789")


@dataclass(frozen=True)
class Counts:
    """Images of each digit, from 0 to 9, by which a whole data set is known."""

    train: tuple[int, ...]
    test: tuple[int, ...]


PUBLISHED = Counts(
    train=(4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
    test=(1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
)


def read(directory: Path, counts: Counts = PUBLISHED) -> ImageSet:
    """The data set from its two .mat files; images are [n, 3, 32, 32]. Counts per class tell a whole one."""
    folder = first_with(directory, ("svhn", "SVHN", ""), "train_32x32.mat")
    if folder is None:
        raise MissingData(
            f"there is no train_32x32.mat in {str(directory / 'svhn')!r} or {str(directory)!r}: "
            f"`sgp data get {NAME} {directory}`"
        )
    train, train_labels = _part(folder / "train_32x32.mat")
    test, test_labels = _part(folder / "test_32x32.mat")
    check_counts(train_labels, counts.train, CLASSES, repr(str(folder / "train_32x32.mat")))
    check_counts(test_labels, counts.test, CLASSES, repr(str(folder / "test_32x32.mat")))
    return ImageSet(train, train_labels, test, test_labels, CLASSES)


def _part(path: Path) -> tuple[Tensor, Tensor]:
    io = need("scipy.io")
    if not path.is_file():
        raise DamagedData(f"there is no file {str(path)!r}: `sgp data get {NAME}` brings it")
    try:
        content = io.loadmat(path, variable_names=["X", "y"])
        # [32, 32, 3, n] there.
        images = torch.from_numpy(np.ascontiguousarray(content["X"].transpose(3, 2, 0, 1)))
        labels = torch.from_numpy(content["y"].astype(np.int64)).flatten()
    # What a damaged file fails with depends on where the damage is.
    except Exception as error:
        raise DamagedData(f"{str(path)!r} is truncated or damaged ({error}): get it again") from error
    if images.dtype != torch.uint8 or images.shape[1:] != (3, 32, 32) or len(images) != len(labels):
        raise DamagedData(f"{str(path)!r} holds no images of 32 x 32 pixels with labels: get it again")
    # The digit 0 is class 10 there.
    return images, torch.where(labels == 10, 0, labels)
