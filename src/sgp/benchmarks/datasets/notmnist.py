"""notMNIST: letters A to J in many fonts, as folders of PNG files or as the pickles that GPM and HAT fetch.

Nothing here was compared with published files, which were not at hand: that every class is there, in both parts, is all
that tells a whole data set.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgp.benchmarks.datasets import pickles
from sgp.benchmarks.datasets.cache import Source, cached
from sgp.benchmarks.datasets.images import DamagedData, ImageSet, MissingData, first_with
from sgp.benchmarks.datasets.pictures import decoded, listed

NAME = "notmnist"
CLASSES = list("ABCDEFGHIJ")
SIDE = 32
PICKLES = ("notmnist_train.pkl", "notmnist_test.pkl")
FOLDERS = ("notMNIST", "notmnist", "notMNIST_small", "")
# Two files of the published notMNIST_small are empty.
UNREADABLE = {
    ("A", "RGVtb2NyYXRpY2FCb2xkT2xkc3R5bGUgQm9sZC50dGY=.png"),
    ("F", "Q3Jvc3NvdmVyIEJvbGRPYmxpcXVlLnR0Zg==.png"),
}
LAYOUTS = (
    "notMNIST/{Train,Test}/{A..J}/*.png, notMNIST_small/{A..J}/*.png, or notmnist/notmnist_{train,test}.pkl "
    "(github.com/nkundiushuti/notmnist_convert)"
)


def read(directory: Path) -> ImageSet:
    """The data set from the folder that holds its own; images are [n, 1, 32, 32].

    PNG files, which have 28 x 28 pixels, are resized as those in the pickles were. Without a published division into
    training and test images, a tenth is for testing: with all names sorted, by class and then by name, the first tenth
    of ``numpy.random.RandomState(42).permutation``. (The pickles were divided with this seed too, but in the order of
    somebody's file system.)
    """
    source = _source(directory)
    # The pickles need no decoding.
    return source.decode() if source.files[0].suffix == ".pkl" else cached(NAME, source)


def decode(directory: Path) -> ImageSet:
    """The same, with every file looked at, whatever the cache holds."""
    return _source(directory).decode()


def _source(directory: Path) -> Source:
    folder = first_with(directory, FOLDERS, "notmnist_train.pkl")
    if folder is not None:
        return Source(folder, [folder / name for name in PICKLES], partial(_of_pickles, folder))
    for name in FOLDERS:
        folder = directory / name
        if (folder / "Train" / "A").is_dir():
            train, test = _classes(folder / "Train"), _classes(folder / "Test")
        elif (folder / "A").is_dir():
            train, test = _divided(_classes(folder))
        else:
            continue
        return Source(folder, [path for path, _ in train + test], partial(_of_files, train, test))
    raise MissingData(f"there is no notMNIST in {str(directory)!r}: lay it out as {LAYOUTS}")


def _classes(folder: Path) -> list[tuple[Path, int]]:
    """Image files with their labels, sorted by class and then by name."""
    out = []
    for label, name in enumerate(CLASSES):
        if not (folder / name).is_dir():
            raise DamagedData(f"there is no folder {str(folder / name)!r}: lay notMNIST out as {LAYOUTS}")
        paths = [path for path in listed(folder / name) if (name, path.name) not in UNREADABLE]
        if not paths:
            raise DamagedData(f"there are no images in {str(folder / name)!r}: get notMNIST again")
        out += [(path, label) for path in paths]
    return out


def _divided(files: list[tuple[Path, int]]) -> tuple[list[tuple[Path, int]], list[tuple[Path, int]]]:
    order = np.random.RandomState(42).permutation(len(files))
    held = math.ceil(len(files) / 10)
    test = set(order[:held].tolist())
    return [file for row, file in enumerate(files) if row not in test], [files[row] for row in sorted(test)]


def _of_files(train: list[tuple[Path, int]], test: list[tuple[Path, int]]) -> ImageSet:
    images = [decoded([path for path, _ in files], "L", SIDE, "LANCZOS") for files in (train, test)]
    labels = [torch.tensor([label for _, label in files]) for files in (train, test)]
    return ImageSet(images[0], labels[0], images[1], labels[1], CLASSES)


def _of_pickles(folder: Path) -> ImageSet:
    train, test = (_pickled(folder / name) for name in PICKLES)
    return ImageSet(*train, *test, CLASSES)


def _pickled(path: Path) -> tuple[Tensor, Tensor]:
    content = pickles.read(path)
    features: Any = content.get("features")
    labels: Any = content.get("labels")
    if (
        not isinstance(features, np.ndarray)
        or not isinstance(labels, np.ndarray)
        or features.dtype != np.uint8
        or features.shape != (len(labels), 1, SIDE, SIDE)
        or set(np.unique(labels).tolist()) != set(range(len(CLASSES)))
    ):
        raise DamagedData(f"{str(path)!r} is no file of notMNIST images with labels: get it again")
    return torch.from_numpy(features), torch.from_numpy(labels.astype(np.int64))
