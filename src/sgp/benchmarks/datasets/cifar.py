"""CIFAR-100 and CIFAR-10 in the published "python version": pickles of rows of 3072 pixels."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sgp.benchmarks.datasets import pickles
from sgp.benchmarks.datasets.images import DamagedData, ImageSet, MissingData, check_counts, find_folder

SHAPE = (3, 32, 32)
ROW = math.prod(SHAPE)


@dataclass(frozen=True)
class Part:
    """Training or test images.

    Attributes:
        files: Names of the files.
        each: Number of images of each class.
        digest: Digest of the images, see :func:`digest_images`; None if the published files were not available.
    """

    files: tuple[str, ...]
    each: int
    digest: str | None = None


@dataclass(frozen=True)
class Format:
    """Files of a CIFAR data set and facts that identify a complete one.

    Attributes:
        name: Name of the data set, as in `sgp data get`.
        archive: Name of the published archive.
        folder: Folder that the archive contains.
        train: Training images.
        test: Test images.
        meta: Name of the file with the names of the classes.
        labels: Key of the labels in the files of images.
        names: Key of the names of the classes.
        classes: Number of classes.
    """

    name: str
    archive: str
    folder: str
    train: Part
    test: Part
    meta: str
    labels: str
    names: str
    classes: int


CIFAR100 = Format(
    name="cifar100",
    archive="cifar-100-python.tar.gz",
    folder="cifar-100-python",
    train=Part(("train",), 500, "eb2821554fda8c7f4668a001ee774fc1a64e3583c2729a86c673281a0c1943b1"),
    test=Part(("test",), 100, "ed2f54d86be17f2d8cf60b6023ddd15bfdc63dc3aaf9ac4aae466fb982227a9c"),
    meta="meta",
    labels="fine_labels",
    names="fine_label_names",
    classes=100,
)
CIFAR10 = Format(
    name="cifar10",
    archive="cifar-10-python.tar.gz",
    folder="cifar-10-batches-py",
    train=Part(tuple(f"data_batch_{number}" for number in range(1, 6)), 5000),
    test=Part(("test_batch",), 1000),
    meta="batches.meta",
    labels="labels",
    names="label_names",
    classes=10,
)


def read(directory: Path, form: Format = CIFAR100) -> ImageSet:
    """Read the data set, from its own folder or the folder that contains it.

    Raises:
        MissingData: There is no such data set.
        DamagedData: A file is missing or not the published one.
    """
    first = form.train.files[0]
    folder = find_folder(directory, (form.folder, ""), first)
    if folder is None:
        archive = directory / form.archive
        hint = f"unpack {str(archive)!r} there" if archive.is_file() else f"`sgp data get {form.name} {directory}`"
        raise MissingData(f"there is no {form.folder}/{first} in {str(directory)!r}: {hint}")
    names = pickles.read(folder / form.meta).get(form.names)
    if not isinstance(names, list) or len(names) != form.classes:
        raise DamagedData(f"{str(folder / form.meta)!r} does not name {form.classes} classes: download it again")
    return ImageSet(*_read_part(folder, form.train, form, names), *_read_part(folder, form.test, form, names), names)


def digest_images(images: Tensor, labels: Tensor) -> str:
    """Compute the SHA-256 of the sorted SHA-256 of each image with its label, which ignores the order of the images.

    images: [n, 3, 32, 32], uint8; labels: [n] below 256.
    """
    rows = torch.cat([images.flatten(1), labels.to(torch.uint8).unsqueeze(1)], dim=1).numpy()
    return hashlib.sha256(b"".join(sorted(hashlib.sha256(row).digest() for row in rows))).hexdigest()


def _read_part(folder: Path, part: Part, form: Format, names: list[str]) -> tuple[Tensor, Tensor]:
    images, labels = map(torch.cat, zip(*(_read_file(folder / file, form) for file in part.files), strict=True))
    files = part.files
    where = repr(str(folder / files[0])) if len(files) == 1 else f"{str(folder)!r} ({files[0]} to {files[-1]})"
    check_counts(labels, part.each, names, where)
    if part.digest is not None and digest_images(images, labels) != part.digest:
        raise DamagedData(
            f"{where} has the right number of images, but they are not the published ones: download it again"
        )
    return images, labels


def _read_file(path: Path, form: Format) -> tuple[Tensor, Tensor]:
    content = pickles.read(path)
    rows, labels = content.get("data"), content.get(form.labels)
    if (
        not pickles.is_bytes_array(rows, ROW)
        or not isinstance(labels, list)
        or len(labels) != len(rows)
        or not all(isinstance(label, int) for label in labels)
    ):
        raise DamagedData(f"{str(path)!r} is not a file of {form.name} images with labels: download it again")
    return torch.from_numpy(rows).view(-1, *SHAPE), torch.tensor(labels, dtype=torch.int64)
