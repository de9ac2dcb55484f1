"""miniImageNet: 100 classes of ImageNet with 600 images each, in the layouts in which it circulates.

Its licence does not allow redistribution. Copies differ in how the images were resized and encoded, so that a digest of
pixels cannot be required; a complete copy has the 100 WordNet ids of the published lists, 500 training and 100 test
images of each, and every file can be decoded.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgp.benchmarks.datasets import pickles
from sgp.benchmarks.datasets.cache import Source, load_cached
from sgp.benchmarks.datasets.images import DamagedData, ImageSet, MissingData
from sgp.benchmarks.datasets.pictures import decode_pictures, list_pictures

NAME = "miniimagenet"
SIDE = 84
FOLDERS = ("miniimagenet", "miniImageNet", "mini-imagenet", "")
LISTS = ("train.csv", "val.csv", "test.csv")
CACHES = ("train", "val", "validation", "test")
WORDNET = re.compile(r"n\d{8}")
# Seed of the published split, by ACL's script; also used here to split the data set's own folders.
SPLIT_SEED = 1234
# Training and test files of each class, sorted by name.
Files = dict[str, tuple[list[Path], list[Path]]]
LAYOUTS = (
    "miniimagenet/{train,test}/WNID/*.jpg (500 and 100 images a class), miniimagenet/WNID/*.jpg or "
    "miniimagenet/{train,val,test}/WNID/*.jpg (600 a class), miniimagenet/images/*.jpg with the lists train.csv, "
    "val.csv and test.csv of Ravi and Larochelle, miniimagenet/mini-imagenet-cache-{train,val,test}.pkl, or ACL's "
    "miniimagenet/data.pkl"
)


@dataclass(frozen=True)
class Format:
    """Facts that identify a complete data set.

    Attributes:
        classes: Number of classes.
        train_each: Number of training images of each class.
        test_each: Number of test images of each class.
        names: SHA-256 of the sorted WordNet ids, one per line.
    """

    classes: int
    train_each: int
    test_each: int
    names: str | None

    @property
    def each(self) -> int:
        """Number of images of each class."""
        return self.train_each + self.test_each


PUBLISHED = Format(
    classes=100, train_each=500, test_each=100, names="01be89a8f69ce3bf1f361d701c84ba5eb3b73993fdc56f30641256103dc45e57"
)


def read(directory: Path, form: Format = PUBLISHED) -> ImageSet:
    """Read the data set; images are [n, 3, 84, 84], sorted by class and then by name.

    The first call decodes all images, which takes about a minute; later calls read them from the cache.
    """
    return load_cached(NAME, _find_source(directory, form))


def decode(directory: Path, form: Format = PUBLISHED) -> ImageSet:
    """Read the data set from its files, without the cache."""
    return _find_source(directory, form).decode()


def _find_source(directory: Path, form: Format) -> Source:
    for name in FOLDERS:
        root = directory / name
        files = _find_split_folders(root) or _find_listed_images(root, form) or _find_class_folders(root, form)
        if files is not None:
            return _make_source(root, files, form)
        caches = [path for part in CACHES if (path := root / f"mini-imagenet-cache-{part}.pkl").is_file()]
        if caches:
            return Source(root, caches, partial(_decode_few_shot_pickles, root, caches, form))
        # Only in a folder of its own, since the name is a common one.
        if name and (root / "data.pkl").is_file():
            return Source(root, [root / "data.pkl"], partial(_decode_acl_pickle, root / "data.pkl", form))
    raise MissingData(f"there is no miniImageNet in {str(directory)!r}: lay it out as {LAYOUTS}")


def _find_split_folders(root: Path) -> Files | None:
    """Find train/WNID/*.jpg and test/WNID/*.jpg."""
    train, test = _list_wordnet_folders(root / "train"), _list_wordnet_folders(root / "test")
    # With a validation part, the parts have different classes, as in few-shot learning.
    if not train or _list_wordnet_folders(root / "val"):
        return None
    if not test:
        raise DamagedData(f"there is a folder {str(root / 'train')!r}, but no folder test with images beside it")
    return {name: (paths, test.get(name, [])) for name, paths in train.items()}


def _find_class_folders(root: Path, form: Format) -> Files | None:
    """Find WNID/*.jpg, with the classes in one folder or in three."""
    folders = [_list_wordnet_folders(root / part) for part in ("", "train", "val", "test")]
    return _split_files({name: paths for folder in folders for name, paths in folder.items()}, root, form)


def _find_listed_images(root: Path, form: Format) -> Files | None:
    """Find images/*.jpg with lists of the class of each image."""
    lists = next((where for where in (root, root / "splits") if all((where / name).is_file() for name in LISTS)), None)
    if lists is None or not (root / "images").is_dir():
        return None
    classes: dict[str, list[Path]] = {}
    for name in LISTS:
        with (lists / name).open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                if not row.get("filename") or not row.get("label"):
                    raise DamagedData(f"{str(lists / name)!r} is not a list of filename,label: download it again")
                # Only the name, so that no path leads out of the folder.
                path = root / "images" / Path(row["filename"]).name
                if not path.is_file():
                    raise DamagedData(f"there is no image {str(path)!r}, which is listed in {str(lists)!r}")
                classes.setdefault(row["label"], []).append(path)
    return _split_files({name: sorted(paths) for name, paths in classes.items()}, root, form)


def _list_wordnet_folders(folder: Path) -> dict[str, list[Path]]:
    """Return the image files of each class that has a folder here."""
    folders = sorted(folder.iterdir()) if folder.is_dir() else []
    return {path.name: list_pictures(path) for path in folders if WORDNET.fullmatch(path.name) and path.is_dir()}


def _split_files(classes: dict[str, list[Path]], root: Path, form: Format) -> Files | None:
    """Split the sorted files of each class by one permutation, in which the test images come last."""
    for name, paths in classes.items():
        _check_count(len(paths), form.each, "images", name, root)
    train, test = _split_order(np.random.RandomState(SPLIT_SEED).permutation(form.each), form)
    return {name: ([paths[i] for i in train], [paths[i] for i in test]) for name, paths in classes.items()} or None


def _split_order(order: NDArray[Any], form: Format) -> tuple[NDArray[Any], NDArray[Any]]:
    # Sorted again, so that every layout gives the images in one order.
    return np.sort(order[: form.train_each]), np.sort(order[form.train_each :])


def _make_source(root: Path, files: Files, form: Format) -> Source:
    _check_names(list(files), root, form)
    for name, (train, test) in files.items():
        _check_count(len(train), form.train_each, "training images", name, root)
        _check_count(len(test), form.test_each, "test images", name, root)
        both = {path.name for path in train} & {path.name for path in test}
        if both:
            raise DamagedData(f"{min(both)!r} in {str(root)!r} is both a training and a test image")
    names = sorted(files)
    parts = [[path for name in names for path in files[name][part]] for part in (0, 1)]

    def decode() -> ImageSet:
        train, test = (decode_pictures(paths, "RGB", SIDE, "BILINEAR") for paths in parts)
        return _label(train, test, names, form)

    return Source(root, parts[0] + parts[1], decode)


def _decode_few_shot_pickles(root: Path, caches: list[Path], form: Format) -> ImageSet:
    """Decode the pickles of few-shot learning: pixels, and the rows of each class.

    Each class is split like files, with its rows in their order in place of sorted names.
    """
    classes: dict[str, NDArray[np.uint8]] = {}
    for path in caches:
        content = pickles.read(path)
        pixels: Any = content.get("image_data")
        rows = content.get("class_dict")
        if not pickles.is_bytes_array(pixels, SIDE, SIDE, 3) or not isinstance(rows, dict):
            raise DamagedData(f"{str(path)!r} is not a file of miniImageNet images with classes: download it again")
        for name, members in rows.items():
            numbers = np.asarray(members)
            if numbers.dtype.kind not in "iu" or numbers.min() < 0 or numbers.max() >= len(pixels):
                raise DamagedData(
                    f"{str(path)!r} names images of class {name!r} that it does not have: download it again"
                )
            classes[str(name)] = pixels[numbers]
    _check_names(list(classes), root, form)
    order = np.random.RandomState(SPLIT_SEED).permutation(form.each)
    return _split_arrays(dict(sorted(classes.items())), [order] * form.classes, root, form)


def _decode_acl_pickle(path: Path, form: Format) -> ImageSet:
    """Decode ACL's pickle, which TRGP uses too: images with numbers of classes.

    As in ACL's script, one generator permutes all classes in turn.
    """
    content = pickles.read(path)
    images: Any = content.get("images")
    try:
        pixels: Any = np.stack(images) if isinstance(images, list) else images
        labels = np.asarray(content.get("labels"))
        valid = pickles.is_bytes_array(pixels, SIDE, SIDE, 3) and labels.shape == (len(pixels),)
    except (TypeError, ValueError):
        valid = False
    if not valid or labels.dtype.kind not in "iu" or set(labels.tolist()) != set(range(form.classes)):
        raise DamagedData(
            f"{str(path)!r} is not a file of images of {SIDE} x {SIDE} pixels of {form.classes} classes: "
            "download it again"
        )
    generator = np.random.RandomState(SPLIT_SEED)
    orders = [generator.permutation(form.each) for _ in range(form.classes)]
    return _split_arrays({str(i): pixels[labels == i] for i in range(form.classes)}, orders, path.parent, form)


def _split_arrays(
    classes: dict[str, NDArray[np.uint8]], orders: Sequence[NDArray[Any]], root: Path, form: Format
) -> ImageSet:
    for name, pixels in classes.items():
        _check_count(len(pixels), form.each, "images", name, root)
    rows = [_split_order(order, form) for order in orders]
    train, test = (
        np.concatenate([pixels[own[part]] for pixels, own in zip(classes.values(), rows, strict=True)])
        for part in (0, 1)
    )
    train_images, test_images = (torch.from_numpy(part).permute(0, 3, 1, 2) for part in (train, test))
    return _label(train_images, test_images, list(classes), form)


def _label(train: Tensor, test: Tensor, names: list[str], form: Format) -> ImageSet:
    """Add labels to images that are sorted by class."""
    labels = [torch.arange(form.classes).repeat_interleave(each) for each in (form.train_each, form.test_each)]
    return ImageSet(train, labels[0], test, labels[1], names)


def _check_count(count: int, expected: int, images: str, name: str, root: Path) -> None:
    if count != expected:
        raise DamagedData(f"{str(root)!r} has {count} {images} of class {name!r} and should have {expected}")


def _check_names(names: list[str], root: Path, form: Format) -> None:
    if len(names) != form.classes:
        raise DamagedData(f"{str(root)!r} has {len(names)} classes and should have {form.classes}")
    if form.names is not None and digest_names(names) != form.names:
        raise DamagedData(f"the {form.classes} classes in {str(root)!r} are not those of miniImageNet")


def digest_names(names: list[str]) -> str:
    """Compute the SHA-256 of the sorted names, one per line."""
    return hashlib.sha256("".join(f"{name}\n" for name in sorted(names)).encode()).hexdigest()
