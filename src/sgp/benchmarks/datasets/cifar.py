"""CIFAR-100 and CIFAR-10 in the published "python version": pickles of rows of 3072 pixels."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sgp.benchmarks.datasets import pickles
from sgp.benchmarks.datasets.images import DamagedData, ImageSet, MissingData, check_counts, first_with

SHAPE = (3, 32, 32)
ROW = math.prod(SHAPE)


@dataclass(frozen=True)
class Format:
    """How a CIFAR is laid out and how one that is whole is known.

    Attributes:
        name: of the data set, as in `sgp data get`.
        folder: that the archive unpacks to.
        train: files of training images.
        test: files of test images.
        meta: file with the names of the classes.
        labels: where the files of images have the labels.
        names: where the file of names has them.
        classes: how many.
        train_each: training images of each class.
        test_each: test images of each class.
        digests: of training and test images, see :func:`digest`; None where the published files were not at hand.
    """

    name: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    labels: str
    names: str
    classes: int
    train_each: int
    test_each: int
    digests: tuple[str, str] | None


CIFAR100 = Format(
    name="cifar100",
    folder="cifar-100-python",
    train=("train",),
    test=("test",),
    meta="meta",
    labels="fine_labels",
    names="fine_label_names",
    classes=100,
    train_each=500,
    test_each=100,
    digests=(
        "eb2821554fda8c7f4668a001ee774fc1a64e3583c2729a86c673281a0c1943b1",
        "ed2f54d86be17f2d8cf60b6023ddd15bfdc63dc3aaf9ac4aae466fb982227a9c",
    ),
)
CIFAR10 = Format(
    name="cifar10",
    folder="cifar-10-batches-py",
    train=tuple(f"data_batch_{number}" for number in range(1, 6)),
    test=("test_batch",),
    meta="batches.meta",
    labels="labels",
    names="label_names",
    classes=10,
    train_each=5000,
    test_each=1000,
    digests=None,
)


def read(directory: Path, form: Format = CIFAR100) -> ImageSet:
    """The data set, from the folder that holds its own or from its own; whole, or an error that says what is wrong."""
    folder = first_with(directory, (form.folder, ""), form.train[0])
    if folder is None:
        archive = directory / f"{form.folder.removesuffix('-batches-py').removesuffix('-python')}-python.tar.gz"
        hint = f"unpack {str(archive)!r} there" if archive.is_file() else f"`sgp data get {form.name} {directory}`"
        raise MissingData(f"there is no {form.folder}/{form.train[0]} in {str(directory)!r}: {hint}")
    names = pickles.read(folder / form.meta).get(form.names)
    if not isinstance(names, list) or len(names) != form.classes:
        raise DamagedData(f"{str(folder / form.meta)!r} does not name {form.classes} classes: get it again")
    train, train_labels = _part(folder, form.train, form)
    test, test_labels = _part(folder, form.test, form)
    check_counts(train_labels, form.train_each, names, _named(folder, form.train))
    check_counts(test_labels, form.test_each, names, _named(folder, form.test))
    if form.digests is not None:
        parts = ((form.train, train, train_labels), (form.test, test, test_labels))
        for wanted, (files, images, labels) in zip(form.digests, parts, strict=True):
            if digest(images, labels) != wanted:
                raise DamagedData(
                    f"{_named(folder, files)} has the right number of images, but not the published ones: get it again"
                )
    return ImageSet(train, train_labels, test, test_labels, names)


def digest(images: Tensor, labels: Tensor) -> str:
    """SHA-256 of the sorted SHA-256 of each image with its label: the same in whatever order the images come.

    images: [n, 3, 32, 32], uint8; labels: [n] below 256.
    """
    rows = torch.cat([images.flatten(1), labels.to(torch.uint8).unsqueeze(1)], dim=1).numpy()
    return hashlib.sha256(b"".join(sorted(hashlib.sha256(row).digest() for row in rows))).hexdigest()


def _part(folder: Path, files: Sequence[str], form: Format) -> tuple[Tensor, Tensor]:
    images, labels = [], []
    for file in files:
        content = pickles.read(folder / file)
        rows, numbers = content.get("data"), content.get(form.labels)
        if (
            not isinstance(rows, np.ndarray)
            or rows.dtype != np.uint8
            or rows.ndim != 2
            or rows.shape[1] != ROW
            or not isinstance(numbers, list)
            or len(numbers) != len(rows)
            or not all(isinstance(number, int) for number in numbers)
        ):
            raise DamagedData(f"{str(folder / file)!r} is no file of {form.name} images with labels: get it again")
        images.append(torch.from_numpy(rows).view(-1, *SHAPE))
        labels.append(torch.tensor(numbers, dtype=torch.int64))
    return torch.cat(images), torch.cat(labels)


def _named(folder: Path, files: Sequence[str]) -> str:
    return repr(str(folder / files[0])) if len(files) == 1 else f"{str(folder)!r} ({files[0]} to {files[-1]})"
