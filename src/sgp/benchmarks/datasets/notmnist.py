"""notMNIST: letters A to J in many fonts, as folders of PNG files or as the pickles that GPM and HAT download.

The published files were not available for comparison, so a data set counts as complete when every class has images in
both parts.
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
from sgp.benchmarks.datasets.cache import Source, load_cached
from sgp.benchmarks.datasets.images import DamagedData, ImageSet, MissingData, find_folder
from sgp.benchmarks.datasets.pictures import decode_pictures, list_pictures

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
# Image files with their labels.
Files = list[tuple[Path, int]]


def read(directory: Path) -> ImageSet:
    """Read the data set; images are [n, 1, 32, 32].

    PNG files, which have 28 x 28 pixels, are resized like the images in the pickles. If there is no split into training
    and test images, a tenth is for testing: of all names, sorted by class and then by name, the first tenth of
    ``numpy.random.RandomState(42).permutation``. (The pickles were split with this seed too, but in the order of
    a file system.)
    """
    source = _find_source(directory)
    # The pickles need no decoding.
    return source.decode() if source.files[0].suffix == ".pkl" else load_cached(NAME, source)


def decode(directory: Path) -> ImageSet:
    """Read the data set from its files, without the cache."""
    return _find_source(directory).decode()


def _find_source(directory: Path) -> Source:
    folder = find_folder(directory, FOLDERS, PICKLES[0])
    if folder is not None:
        paths = [folder / name for name in PICKLES]
        return Source(folder, paths, lambda: ImageSet(*_read_pickle(paths[0]), *_read_pickle(paths[1]), CLASSES))
    for folder in (directory / name for name in FOLDERS):
        if (folder / "Train" / "A").is_dir():
            train, test = _list_files(folder / "Train"), _list_files(folder / "Test")
        elif (folder / "A").is_dir():
            train, test = _split(_list_files(folder))
        else:
            continue
        return Source(folder, [path for path, _ in train + test], partial(_decode_files, train, test))
    raise MissingData(f"there is no notMNIST in {str(directory)!r}: lay it out as {LAYOUTS}")


def _list_files(folder: Path) -> Files:
    """Return the image files with their labels, sorted by class and then by name."""
    files: Files = []
    for label, name in enumerate(CLASSES):
        if not (folder / name).is_dir():
            raise DamagedData(f"there is no folder {str(folder / name)!r}: lay notMNIST out as {LAYOUTS}")
        paths = [path for path in list_pictures(folder / name) if (name, path.name) not in UNREADABLE]
        if not paths:
            raise DamagedData(f"there are no images in {str(folder / name)!r}: download notMNIST again")
        files += [(path, label) for path in paths]
    return files


def _split(files: Files) -> tuple[Files, Files]:
    test = np.random.RandomState(42).permutation(len(files))[: math.ceil(len(files) / 10)]
    held = set(test.tolist())
    return [file for row, file in enumerate(files) if row not in held], [files[row] for row in sorted(held)]


def _decode_files(train: Files, test: Files) -> ImageSet:
    parts = [
        (
            decode_pictures([path for path, _ in files], "L", SIDE, "LANCZOS"),
            torch.tensor([label for _, label in files]),
        )
        for files in (train, test)
    ]
    return ImageSet(*parts[0], *parts[1], CLASSES)


def _read_pickle(path: Path) -> tuple[Tensor, Tensor]:
    content = pickles.read(path)
    features: Any = content.get("features")
    labels: Any = content.get("labels")
    if (
        not pickles.is_bytes_array(features, 1, SIDE, SIDE)
        or not isinstance(labels, np.ndarray)
        or labels.shape != features.shape[:1]
        or set(np.unique(labels).tolist()) != set(range(len(CLASSES)))
    ):
        raise DamagedData(f"{str(path)!r} is not a file of notMNIST images with labels: download it again")
    return torch.from_numpy(features), torch.from_numpy(labels.astype(np.int64))
