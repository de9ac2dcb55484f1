"""SVHN, cropped digits, in the published MATLAB files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sgp.benchmarks.datasets.images import DamagedData, ImageSet, MissingData, check_counts, find_folder
from sgp.extras import import_extra

NAME = "svhn"
CLASSES = list("0123456789")


@dataclass(frozen=True)
class Counts:
    """Number of images of each digit, from 0 to 9, which identify a complete data set."""

    train: tuple[int, ...]
    test: tuple[int, ...]


PUBLISHED = Counts(
    train=(4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
    test=(1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
)


def read(directory: Path, counts: Counts = PUBLISHED) -> ImageSet:
    """Read the data set from its two .mat files; images are [n, 3, 32, 32].

    Files that are missing, truncated or not the published ones raise DamagedData.

    Raises:
        MissingData: There is no such data set.
    """
    folder = find_folder(directory, ("svhn", "SVHN", ""), "train_32x32.mat")
    if folder is None:
        raise MissingData(
            f"there is no train_32x32.mat in {str(directory / 'svhn')!r} or {str(directory)!r}: "
            f"`sgp data get {NAME} {directory}`"
        )
    train, test = (_read_part(folder / f"{part}_32x32.mat", getattr(counts, part)) for part in ("train", "test"))
    return ImageSet(*train, *test, CLASSES)


def _read_part(path: Path, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    io = import_extra("scipy.io")
    if not path.is_file():
        raise DamagedData(f"there is no file {str(path)!r}: `sgp data get {NAME}` downloads it")
    try:
        content = io.loadmat(path, variable_names=["X", "y"])
        # The file has [32, 32, 3, n].
        images = torch.from_numpy(np.ascontiguousarray(content["X"].transpose(3, 2, 0, 1)))
        labels = torch.from_numpy(content["y"].astype(np.int64)).flatten()
    # The error of a damaged file depends on where the damage is.
    except Exception as error:
        raise DamagedData(f"{str(path)!r} is truncated or damaged ({error}): download it again") from error
    if images.dtype != torch.uint8 or images.shape[1:] != (3, 32, 32) or len(images) != len(labels):
        raise DamagedData(f"{str(path)!r} has no images of 32 x 32 pixels with labels: download it again")
    # The digit 0 is class 10 in the file.
    labels = torch.where(labels == 10, 0, labels)
    check_counts(labels, counts, CLASSES, repr(str(path)))
    return images, labels
