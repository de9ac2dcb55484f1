"""MNIST and FashionMNIST in the published IDX files, plain or as .gz."""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sgp.benchmarks.datasets.images import DamagedData, ImageSet, MissingData, check_counts, find_folder

# Third byte of the magic number: unsigned bytes, the only type in these data sets. The fourth is the rank.
UNSIGNED_BYTE = 8


@dataclass(frozen=True)
class Format:
    """Places of the files and facts that identify a complete data set.

    Attributes:
        name: Name of the data set, as in `sgp data get`.
        folders: Folders that may contain the files; "" is the directory itself.
        classes: Names of the classes.
        train_each: Number of training images of each class.
        test_each: Number of test images of each class.
        side: Height and width of the images.
    """

    name: str
    folders: tuple[str, ...]
    classes: tuple[str, ...]
    train_each: tuple[int, ...]
    test_each: tuple[int, ...]
    side: int = 28


MNIST = Format(
    name="mnist",
    folders=("MNIST/raw", "mnist", ""),
    classes=tuple("0123456789"),
    train_each=(5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
    test_each=(980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
)
FASHION = Format(
    name="fashion-mnist",
    folders=("FashionMNIST/raw", "fashion-mnist", ""),
    classes=("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    train_each=(6000,) * 10,
    test_each=(1000,) * 10,
)


def read(directory: Path, form: Format = MNIST) -> ImageSet:
    """Read the data set; images are [n, 1, 28, 28]. The number of images of each class identifies a complete one.

    Files that are missing, truncated or not the published ones raise DamagedData.

    Raises:
        MissingData: There is no such data set.
    """
    name = "train-labels-idx1-ubyte"
    folder = find_folder(directory, form.folders, name) or find_folder(directory, form.folders, f"{name}.gz")
    if folder is None:
        raise MissingData(
            f"there is no {name}, plain or .gz, in {str(directory / form.folders[0])!r}, "
            f"{str(directory / form.folders[1])!r} or {str(directory)!r}: `sgp data get {form.name} {directory}`"
        )
    labels = [_read_array(folder, f"{part}-labels-idx1-ubyte", 1, form).long() for part in ("train", "t10k")]
    for other in (MNIST, FASHION):
        # The two data sets have the same file names, so the files of one may be in the folder of the other.
        if other.name != form.name and _count_labels(labels[0]) == other.train_each != form.train_each:
            raise MissingData(f"the files in {str(folder)!r} are those of {other.name}, not of {form.name}")
    classes = list(form.classes)
    check_counts(labels[0], form.train_each, classes, f"{str(folder)!r} (train)")
    check_counts(labels[1], form.test_each, classes, f"{str(folder)!r} (t10k)")
    train, test = (
        _read_images(folder, part, form, len(own)) for part, own in zip(("train", "t10k"), labels, strict=True)
    )
    return ImageSet(train, labels[0], test, labels[1], classes)


def _read_images(folder: Path, part: str, form: Format, count: int) -> Tensor:
    images = _read_array(folder, f"{part}-images-idx3-ubyte", 3, form)
    if images.shape != (count, form.side, form.side):
        raise DamagedData(
            f"{part}-images-idx3-ubyte in {str(folder)!r} has shape {tuple(images.shape)} and should have "
            f"{(count, form.side, form.side)}: download it again"
        )
    return images.unsqueeze(1)


def _count_labels(labels: Tensor) -> tuple[int, ...]:
    return tuple(torch.bincount(labels, minlength=10).tolist())


def _read_array(folder: Path, name: str, rank: int, form: Format) -> Tensor:
    """Read the unsigned bytes of a file, in the shape that its header gives."""
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
    if path is None:
        raise DamagedData(
            f"there is no {name}, plain or .gz, in {str(folder)!r}: `sgp data get {form.name}` downloads it"
        )
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, OSError, zlib.error) as error:
        raise DamagedData(f"{str(path)!r} is truncated or damaged ({error}): download it again") from error
    head = 4 + 4 * rank
    if len(content) < head or content[:4] != bytes([0, 0, UNSIGNED_BYTE, rank]):
        raise DamagedData(f"{str(path)!r} is not an IDX file of {rank}-dimensional bytes: download it again")
    shape = np.frombuffer(content, ">u4", rank, offset=4).tolist()
    if len(content) - head != math.prod(shape):
        raise DamagedData(
            f"{str(path)!r} has {len(content) - head} bytes after its header, which promises {math.prod(shape)}: "
            "download it again"
        )
    # Copied, since torch needs bytes that can be written to.
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=head).reshape(shape).copy())
