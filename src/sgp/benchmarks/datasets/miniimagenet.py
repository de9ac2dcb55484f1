"""miniImageNet: 100 classes of ImageNet with 600 images each, in the layouts that are about.

Its licence does not let us hand it on. Copies differ in how the images were resized and encoded, so that no digest
of pixels can be asked for; a whole copy has the 100 WordNet ids of the published lists, 500 training and 100 test
images of each, and every file decodes.
"""

from __future__ import annotations

import csv
import hashlib
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgp.benchmarks.datasets import pickles
from sgp.benchmarks.datasets.cache import Source, cached
from sgp.benchmarks.datasets.images import DamagedData, ImageSet, MissingData
from sgp.benchmarks.datasets.pictures import decoded, listed

NAME = "miniimagenet"
SIDE = 84
FOLDERS = ("miniimagenet", "miniImageNet", "mini-imagenet", "")
LISTS = ("train.csv", "val.csv", "test.csv")
CACHES = ("train", "val", "validation", "test")
WORDNET = re.compile(r"n\d{8}")
# Of the published split: in ACL's script, and in the data set's own folders here.
SPLIT_SEED = 1234
# Training and test files of each class, sorted by name.
Files = tuple[dict[str, list[Path]], dict[str, list[Path]]]
LAYOUTS = (
    "miniimagenet/{train,test}/WNID/*.jpg (500 and 100 images a class), miniimagenet/WNID/*.jpg or "
    "miniimagenet/{train,val,test}/WNID/*.jpg (600 a class), miniimagenet/images/*.jpg with the lists train.csv, "
    "val.csv and test.csv of Ravi and Larochelle, miniimagenet/mini-imagenet-cache-{train,val,test}.pkl, or ACL's "
    "miniimagenet/data.pkl"
)


@dataclass(frozen=True)
class Format:
    """How a whole data set is known.

    Attributes:
        classes: how many.
        train_each: training images of each class.
        test_each: test images of each class.
        names: SHA-256 of the sorted WordNet ids, one a line.
    """

    classes: int
    train_each: int
    test_each: int
    names: str | None


PUBLISHED = Format(
    classes=100, train_each=500, test_each=100, names="01be89a8f69ce3bf1f361d701c84ba5eb3b73993fdc56f30641256103dc45e57"
)


def read(directory: Path, form: Format = PUBLISHED) -> ImageSet:
    """The data set from the folder that holds its own; images are [n, 3, 84, 84], sorted by class and then by name.

    The first time all images are decoded, which takes a minute or so; from then on they come from the cache.
    """
    return cached(NAME, _source(directory, form))


def decode(directory: Path, form: Format = PUBLISHED) -> ImageSet:
    """The same, with every file looked at, whatever the cache holds."""
    return _source(directory, form).decode()


def _source(directory: Path, form: Format) -> Source:
    for name in FOLDERS:
        root = directory / name
        files = _divided_folders(root) or _listed_images(root, form) or _class_folders(root, form)
        if files is not None:
            return _of_files(root, files, form)
        caches = [path for part in CACHES if (path := root / f"mini-imagenet-cache-{part}.pkl").is_file()]
        if caches:
            return Source(root, caches, partial(_of_caches, root, caches, form))
        # Only in a folder of its own: anything may be called that.
        if name and (root / "data.pkl").is_file():
            return Source(root, [root / "data.pkl"], partial(_of_acl, root / "data.pkl", form))
    raise MissingData(f"there is no miniImageNet in {str(directory)!r}: lay it out as {LAYOUTS}")


def _divided_folders(root: Path) -> Files | None:
    """train/WNID/*.jpg and test/WNID/*.jpg."""
    # With a part for validation, the parts differ in their classes: few-shot learning has it so.
    if not _wordnet_folders(root / "train") or _wordnet_folders(root / "val"):
        return None
    if not _wordnet_folders(root / "test"):
        raise DamagedData(f"there is a folder {str(root / 'train')!r}, but none beside it with test images")
    train, test = (
        {folder.name: listed(folder) for folder in _wordnet_folders(root / part)} for part in ("train", "test")
    )
    return train, test


def _class_folders(root: Path, form: Format) -> Files | None:
    """WNID/*.jpg, the classes in one folder or in three."""
    folders = [folder for part in ("", "train", "val", "test") for folder in _wordnet_folders(root / part)]
    return _divided({folder.name: listed(folder) for folder in folders}, root, form) if folders else None


def _listed_images(root: Path, form: Format) -> Files | None:
    """images/*.jpg with lists that tell the class of each."""
    lists = next((where for where in (root, root / "splits") if all((where / name).is_file() for name in LISTS)), None)
    if lists is None or not (root / "images").is_dir():
        return None
    classes: dict[str, list[Path]] = {}
    for name in LISTS:
        with (lists / name).open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if not row.get("filename") or not row.get("label"):
                    raise DamagedData(f"{str(lists / name)!r} is no list of filename,label: get it again")
                # A name, not a way out of the folder.
                classes.setdefault(row["label"], []).append(root / "images" / Path(row["filename"]).name)
    for paths in classes.values():
        for path in paths:
            if not path.is_file():
                raise DamagedData(f"there is no image {str(path)!r}, which the lists in {str(lists)!r} name")
    return _divided({name: sorted(paths) for name, paths in classes.items()}, root, form)


def _wordnet_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if WORDNET.fullmatch(path.name) and path.is_dir())


def _divided(classes: dict[str, list[Path]], root: Path, form: Format) -> Files:
    """Training and test files: for every class the sorted names, permuted by a generator of its own; the last are for
    testing."""
    each = form.train_each + form.test_each
    for name, paths in classes.items():
        if len(paths) != each:
            raise DamagedData(f"{str(root)!r} has {len(paths)} images of class {name!r} and should have {each}")
    order = np.random.RandomState(SPLIT_SEED).permutation(each)
    # Sorted again, so that every layout gives the images in one order.
    train, test = (
        {name: [paths[row] for row in rows] for name, paths in classes.items()}
        for rows in (sorted(order[: form.train_each]), sorted(order[form.train_each :]))
    )
    return train, test


def _of_files(root: Path, files: Files, form: Format) -> Source:
    train, test = files
    _check_names(list(train), root, form)
    for part, classes, each in (("training", train, form.train_each), ("test", test, form.test_each)):
        for name in train:
            if len(classes.get(name, [])) != each:
                count = len(classes.get(name, []))
                raise DamagedData(f"{str(root)!r} has {count} {part} images of class {name!r} and should have {each}")
    for name in train:
        both = {path.name for path in train[name]} & {path.name for path in test[name]}
        if both:
            raise DamagedData(f"{min(both)!r} in {str(root)!r} is both a training and a test image")
    names = sorted(train)
    paths = [[path for name in names for path in part[name]] for part in (train, test)]

    def decode() -> ImageSet:
        images = [decoded(part, "RGB", SIDE, "BILINEAR") for part in paths]
        return ImageSet(images[0], _labels(form, form.train_each), images[1], _labels(form, form.test_each), names)

    return Source(root, [path for part in paths for path in part], decode)


def _of_caches(root: Path, caches: list[Path], form: Format) -> ImageSet:
    """The pickles of few-shot learning: rows of pixels, and which rows each class has. Each class is divided as files
    are, its rows in their order in place of sorted names."""
    classes: dict[str, NDArray[np.uint8]] = {}
    for path in caches:
        content = pickles.read(path)
        pixels: Any = content.get("image_data")
        rows = content.get("class_dict")
        if not _are_pixels(pixels) or not isinstance(rows, dict):
            raise DamagedData(f"{str(path)!r} is no file of miniImageNet images with classes: get it again")
        for name, members in rows.items():
            numbers = np.asarray(members)
            if numbers.dtype.kind not in "iu" or numbers.min() < 0 or numbers.max() >= len(pixels):
                raise DamagedData(f"{str(path)!r} names images of class {name!r} that it does not have: get it again")
            classes[str(name)] = pixels[numbers]
    _check_names(list(classes), root, form)
    order = np.random.RandomState(SPLIT_SEED).permutation(form.train_each + form.test_each)
    names = sorted(classes)
    return _of_arrays([classes[name] for name in names], [order] * len(names), names, root, form)


def _of_acl(path: Path, form: Format) -> ImageSet:
    """ACL's pickle, which TRGP uses too: images with numbers of classes, divided as ACL's script does it: one generator
    permutes all classes in turn."""
    content = pickles.read(path)
    images: Any = content.get("images")
    try:
        pixels: Any = np.stack(images) if isinstance(images, list) else images
        labels = np.asarray(content.get("labels"))
        whole = _are_pixels(pixels) and labels.shape == (len(pixels),) and labels.dtype.kind in "iu"
    except (TypeError, ValueError):
        whole = False
    if not whole or set(labels.tolist()) != set(range(form.classes)):
        raise DamagedData(
            f"{str(path)!r} is no file of images of {SIDE} x {SIDE} pixels of {form.classes} classes: get it again"
        )
    generator = np.random.RandomState(SPLIT_SEED)
    orders = [generator.permutation(form.train_each + form.test_each) for _ in range(form.classes)]
    classes = [pixels[labels == number] for number in range(form.classes)]
    return _of_arrays(classes, orders, [str(number) for number in range(form.classes)], path.parent, form)


def _of_arrays(
    classes: list[NDArray[np.uint8]], orders: list[NDArray[Any]], names: list[str], root: Path, form: Format
) -> ImageSet:
    each = form.train_each + form.test_each
    for name, pixels in zip(names, classes, strict=True):
        if len(pixels) != each:
            raise DamagedData(f"{str(root)!r} has {len(pixels)} images of class {name!r} and should have {each}")
    train, test = (
        torch.from_numpy(
            np.concatenate([pixels[np.sort(order[rows])] for pixels, order in zip(classes, orders, strict=True)])
        ).permute(0, 3, 1, 2)
        for rows in (slice(None, form.train_each), slice(form.train_each, None))
    )
    return ImageSet(train, _labels(form, form.train_each), test, _labels(form, form.test_each), names)


def _labels(form: Format, each: int) -> Tensor:
    return torch.arange(form.classes).repeat_interleave(each)


def _are_pixels(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.shape[1:] == (SIDE, SIDE, 3)


def _check_names(names: list[str], root: Path, form: Format) -> None:
    if len(names) != form.classes:
        raise DamagedData(f"{str(root)!r} has {len(names)} classes and should have {form.classes}")
    if form.names is not None and names_digest(names) != form.names:
        raise DamagedData(f"the {form.classes} classes in {str(root)!r} are not those of miniImageNet")


def names_digest(names: list[str]) -> str:
    """SHA-256 of the names, sorted, one a line."""
    return hashlib.sha256("".join(f"{name}\n" for name in sorted(names)).encode()).hexdigest()
