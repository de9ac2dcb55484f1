"""A data set of images in memory, and what can be wrong with one on disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Where data sets lie when the command does not say it.
VARIABLE = "SGP_DATA"


class DataError(ValueError):
    """A data set cannot be used; the message says what is wrong and what to do."""


class MissingData(DataError):  # noqa: N818 (it is what the user sees, and it says what is wrong)
    """A data set is not there at all."""


class DamagedData(DataError):  # noqa: N818
    """A data set is there but not whole: a file of it is missing, truncated or not the published one."""


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images with their labels, as published.

    Attributes:
        train: [n, c, h, w], uint8.
        train_labels: [n], int64, indices into `classes`.
        test: [m, c, h, w], uint8.
        test_labels: [m], int64.
        classes: their names.
    """

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    classes: list[str]


def find(directory: Path | None, dataset: str) -> Path:
    """The folder that data sets lie in: the one given, or that of $SGP_DATA."""
    if directory is None:
        if not os.environ.get(VARIABLE):
            raise MissingData(
                f"where is {dataset}? Name the folder that holds it (--data DIR of a run) or set ${VARIABLE}; "
                f"`sgp data get {dataset} DIR` fetches it, or says how to lay it out"
            )
        directory = Path(os.environ[VARIABLE])
    directory = directory.expanduser()
    if not directory.is_dir():
        raise MissingData(f"there is no folder {str(directory)!r} to read {dataset} from")
    return directory


def first_with(directory: Path, folders: tuple[str, ...], file: str) -> Path | None:
    """The first of some folders under a directory ("" is itself) that has a file of this name."""
    for folder in folders:
        if (directory / folder / file).is_file():
            return directory / folder
    return None


def check_counts(labels: Tensor, each: int | tuple[int, ...], classes: list[str], where: str) -> None:
    """That every class has as many images as it should: the same number each, or one number per class."""
    expected = (each,) * len(classes) if isinstance(each, int) else each
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
        raise DamagedData(f"{where} has a label outside 0..{len(classes) - 1}: get it again")
    counts = torch.bincount(labels, minlength=len(classes)).tolist()
    for name, count, wanted in zip(classes, counts, expected, strict=True):
        if count != wanted:
            raise DamagedData(f"{where} has {count} images of class {name!r} and should have {wanted}: get it again")
