"""Image data sets in memory, and the errors of data sets on disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Environment variable with the folder of the data sets.
VARIABLE = "SGP_DATA"


class DataError(ValueError):
    """A data set cannot be used; the message says what is wrong and what to do."""


class MissingData(DataError):  # noqa: N818 (users see the name, and it says what is wrong)
    """A data set was not found."""


class DamagedData(DataError):  # noqa: N818
    """A file of a data set is missing, truncated or not the published one."""


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images with their labels, as published.

    Attributes:
        train: Training images, [n, c, h, w], uint8.
        train_labels: Indices into `classes`, [n], int64.
        test: Test images, [m, c, h, w], uint8.
        test_labels: Indices into `classes`, [m], int64.
        classes: Names of the classes.
    """

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    classes: list[str]


def find_data_folder(directory: Path | None, dataset: str) -> Path:
    """Return the folder of the data sets: the given one, or $SGP_DATA.

    Args:
        directory: Folder, or None for $SGP_DATA.
        dataset: Name of the data set to read, for error messages.

    Raises:
        MissingData: No folder is given, or it does not exist.
    """
    if directory is None:
        if not os.environ.get(VARIABLE):
            raise MissingData(
                f"where is {dataset}? Name the folder that holds it (--data DIR of a run) or set ${VARIABLE}; "
                f"`sgp data get {dataset} DIR` downloads it, or says how to lay it out"
            )
        directory = Path(os.environ[VARIABLE])
    directory = directory.expanduser()
    if not directory.is_dir():
        raise MissingData(f"there is no folder {str(directory)!r} to read {dataset} from")
    return directory


def find_folder(directory: Path, folders: tuple[str, ...], file: str) -> Path | None:
    """Return the first of some folders in a directory ("" is the directory itself) that has a file of this name."""
    return next((directory / folder for folder in folders if (directory / folder / file).is_file()), None)


def check_counts(labels: Tensor, each: int | tuple[int, ...], classes: list[str], where: str) -> None:
    """Raise unless every class has its number of images.

    Args:
        labels: Labels of the images, [n].
        each: Number of images of every class, or of each.
        classes: Names of the classes.
        where: Name of the file, for error messages.

    Raises:
        DamagedData: A class has another number of images, or a label has no class.
    """
    expected = (each,) * len(classes) if isinstance(each, int) else each
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
        raise DamagedData(f"{where} has a label outside 0..{len(classes) - 1}: download it again")
    counts = torch.bincount(labels, minlength=len(classes)).tolist()
    for name, count, wanted in zip(classes, counts, expected, strict=True):
        if count != wanted:
            raise DamagedData(
                f"{where} has {count} images of class {name!r} and should have {wanted}: download it again"
            )
