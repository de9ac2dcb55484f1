"""Whether the data sets in a folder are whole: every file is read, nothing is taken from the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sgp.benchmarks.datasets import cifar, english, idx, miniimagenet, notmnist, svhn, texts
from sgp.benchmarks.datasets.images import DataError, ImageSet, MissingData

READERS: dict[str, Callable[[Path], ImageSet | str]] = {
    cifar.CIFAR100.name: lambda directory: cifar.read(directory, cifar.CIFAR100),
    cifar.CIFAR10.name: lambda directory: cifar.read(directory, cifar.CIFAR10),
    miniimagenet.NAME: miniimagenet.decode,
    idx.MNIST.name: lambda directory: idx.read(directory, idx.MNIST),
    idx.FASHION.name: lambda directory: idx.read(directory, idx.FASHION),
    svhn.NAME: svhn.read,
    notmnist.NAME: notmnist.decode,
    # Of texts, what is there in a sentence.
    texts.CLINC150: texts.describe_clinc150,
    texts.FIVETEXT: texts.describe_fivetext,
    english.NAME: english.describe,
}


@dataclass(frozen=True)
class Report:
    """What was found of a data set.

    Attributes:
        name: of the data set.
        state: whether it can be used.
        detail: a sentence: what is there, or what is wrong, with which file, and what to do.
    """

    name: str
    state: Literal["complete", "missing", "damaged"]
    detail: str


def check(directory: Path) -> list[Report]:
    """A report on every data set that there is a reader for."""
    if not directory.is_dir():
        raise MissingData(f"there is no folder {str(directory)!r}")
    return [check_one(name, directory) for name in READERS]


def check_one(name: str, directory: Path) -> Report:
    """A report on one data set."""
    try:
        found = READERS[name](directory)
    except MissingData as error:
        return Report(name, "missing", str(error))
    except DataError as error:
        return Report(name, "damaged", str(error))
    if isinstance(found, ImageSet):
        found = f"{len(found.train)} training and {len(found.test)} test images of {len(found.classes)} classes"
    return Report(name, "complete", found)
