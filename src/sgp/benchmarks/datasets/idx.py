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

from sgp.benchmarks.datasets.images import DamagedData, ImageSet, MissingData, check_counts, first_with

# Third byte of the magic number: unsigned bytes, the only type that these data sets have. The fourth is the rank.
UNSIGNED_BYTE = 8


@dataclass(frozen=True)
class Format:
    """Where the files are and how many images of each class they have.

    Attributes:
        name: of the data set, as in `sgp data get`.
        folders: where the files may lie; "" is the folder itself.
        classes: their names.
        train_each: training images of each class.
        test_each: test images of each class.
        side: height and width of the images.
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
    classes=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    train_each=(6000,) * 10,
    test_each=(1000,) * 10,
)


def read(directory: Path, form: Format = MNIST) -> ImageSet:
    """The data set from the folder that holds its own; images are [n, 1, 28, 28]. Counts per class tell a whole one."""
    names = ("train-labels-idx1-ubyte", "train-labels-idx1-ubyte.gz")
    folders = [folder for name in names if (folder := first_with(directory, form.folders, name))]
    if not folders:
        raise MissingData(
            f"there is no {names[0]}, plain or .gz, in {str(directory / form.folders[0])!r}, "
            f"{str(directory / form.folders[1])!r} or {str(directory)!r}: `sgp data get {form.name} {directory}`"
        )
    folder = folders[0]
    train_labels = _labels(folder, "train", form)
    test_labels = _labels(folder, "t10k", form)
    for other in (MNIST, FASHION):
        # The two data sets have the same file names, so that one may lie where the other is looked for.
        if other.name != form.name and _counts(train_labels) == other.train_each != form.train_each:
            raise MissingData(f"the files in {str(folder)!r} are those of {other.name}, not of {form.name}")
    classes = list(form.classes)
    check_counts(train_labels, form.train_each, classes, f"{str(folder)!r} (train)")
    check_counts(test_labels, form.test_each, classes, f"{str(folder)!r} (t10k)")
    train, test = _images(folder, "train", form, len(train_labels)), _images(folder, "t10k", form, len(test_labels))
    return ImageSet(train, train_labels, test, test_labels, classes)


def _labels(folder: Path, part: str, form: Format) -> Tensor:
    return _array(folder, f"{part}-labels-idx1-ubyte", 1, form).long()


def _images(folder: Path, part: str, form: Format, count: int) -> Tensor:
    images = _array(folder, f"{part}-images-idx3-ubyte", 3, form)
    if images.shape != (count, form.side, form.side):
        raise DamagedData(
            f"{part}-images-idx3-ubyte in {str(folder)!r} has shape {tuple(images.shape)} and should have "
            f"{(count, form.side, form.side)}: get it again"
        )
    return images.unsqueeze(1)


def _counts(labels: Tensor) -> tuple[int, ...]:
    return tuple(torch.bincount(labels, minlength=10).tolist())


def _array(folder: Path, name: str, rank: int, form: Format) -> Tensor:
    """The unsigned bytes of one file, in the shape that its header gives."""
    plain, packed = folder / name, folder / f"{name}.gz"
    path = plain if plain.is_file() else packed
    try:
        content = plain.read_bytes() if path == plain else gzip.decompress(packed.read_bytes())
    except FileNotFoundError:
        raise DamagedData(
            f"there is no {name}, plain or .gz, in {str(folder)!r}: `sgp data get {form.name}` brings it"
        ) from None
    except (EOFError, OSError, zlib.error) as error:
        raise DamagedData(f"{str(path)!r} is truncated or damaged ({error}): get it again") from error
    head = 4 + 4 * rank
    if len(content) < head or content[:4] != bytes([0, 0, UNSIGNED_BYTE, rank]):
        raise DamagedData(f"{str(path)!r} is no IDX file of {rank}-dimensional bytes: get it again")
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, head, 4))
    if len(content) - head != math.prod(shape):
        raise DamagedData(
            f"{str(path)!r} has {len(content) - head} bytes after its header, which promises {math.prod(shape)}: "
            "get it again"
        )
    # Copied, since the bytes cannot be written to and torch asks for that.
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=head).reshape(shape).copy())
