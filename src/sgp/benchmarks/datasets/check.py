"""Check of the data sets in a folder: every file is read, and the cache is not used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sgp.benchmarks.datasets import cifar, english, idx, miniimagenet, notmnist, svhn, texts
from sgp.benchmarks.datasets.images import DataError, ImageSet, MissingData

# Function that reads each data set and returns its images, or a sentence about its texts.
READERS: dict[str, Callable[[Path], ImageSet | str]] = {
    cifar.CIFAR100.name: lambda directory: cifar.read(directory, cifar.CIFAR100),
    cifar.CIFAR10.name: lambda directory: cifar.read(directory, cifar.CIFAR10),
    miniimagenet.NAME: miniimagenet.decode,
    idx.MNIST.name: lambda directory: idx.read(directory, idx.MNIST),
    idx.FASHION.name: lambda directory: idx.read(directory, idx.FASHION),
    svhn.NAME: svhn.read,
    notmnist.NAME: notmnist.decode,
    texts.CLINC150: texts.describe_clinc150,
    texts.FIVETEXT: texts.describe_fivetext,
    english.NAME: english.describe,
}


@dataclass(frozen=True)
class Report:
    """Result of the check of a data set.

    Attributes:
        name: Name of the data set.
        state: Whether the data set can be used.
        detail: Sentence that says what was found, or what is wrong, with which file, and what to do.
    """

    name: str
    state: Literal["complete", "missing", "damaged"]
    detail: str


def check_all(directory: Path) -> list[Report]:
    """Check every data set that has a reader."""
    if not directory.is_dir():
        raise MissingData(f"there is no folder {str(directory)!r}")
    return [check_one(name, directory) for name in READERS]


def check_one(name: str, directory: Path) -> Report:
    """Check one data set."""
    try:
        found = READERS[name](directory)
    except DataError as error:
        return Report(name, "missing" if isinstance(error, MissingData) else "damaged", str(error))
    if isinstance(found, ImageSet):
        found = f"{len(found.train)} training and {len(found.test)} test images of {len(found.classes)} classes"
    return Report(name, "complete", found)
