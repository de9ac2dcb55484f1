"""Create small data sets, in memory and in files of the published formats."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sgp.benchmarks.datasets import cifar, idx, miniimagenet
from sgp.benchmarks.datasets.images import ImageSet

SMALL_CIFAR = replace(
    cifar.CIFAR100, classes=3, train=cifar.Part(("train",), each=4), test=cifar.Part(("test",), each=2)
)
SMALL_CIFAR10 = replace(
    cifar.CIFAR10, classes=2, train=replace(cifar.CIFAR10.train, each=5), test=replace(cifar.CIFAR10.test, each=2)
)
SMALL_MINI = miniimagenet.Format(classes=3, train_each=5, test_each=2, names=None)
SMALL_MNIST = replace(idx.MNIST, train_each=tuple(range(3, 13)), test_each=(2,) * 10)
WORDNET_IDS = ("n00000003", "n00000001", "n00000002")


def random_pixels(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng([seed, *shape]).integers(0, 256, shape, dtype=np.uint8)


def image_set(classes: int, train_each: int, test_each: int, side: int = 32, channels: int = 3) -> ImageSet:
    """Create random images in random order."""
    parts = []
    for seed, each in enumerate((train_each, test_each)):
        labels = np.random.default_rng(seed).permutation(np.arange(classes).repeat(each))
        parts.append(torch.from_numpy(random_pixels(classes * each, channels, side, side, seed=seed)))
        parts.append(torch.from_numpy(labels))
    return ImageSet(*parts, classes=[f"class {label}" for label in range(classes)])


def are_equal(one: ImageSet, other: ImageSet) -> bool:
    tensors = ("train", "train_labels", "test", "test_labels")
    return one.classes == other.classes and all(torch.equal(getattr(one, n), getattr(other, n)) for n in tensors)


def dump(path: Path, content: object, protocol: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        pickle.dump(content, file, protocol=protocol)


def write_cifar(directory: Path, form: cifar.Format, protocol: int = 2) -> ImageSet:
    """Write a CIFAR into its own folder, and return its images."""
    names = [f"class {label}" for label in range(form.classes)]
    images = image_set(form.classes, form.train.each, form.test.each)
    dump(directory / form.folder / form.meta, {form.names: names}, protocol)
    for files, pixels, labels in (
        (form.train.files, images.train, images.train_labels),
        (form.test.files, images.test, images.test_labels),
    ):
        for file, some, their in zip(files, pixels.chunk(len(files)), labels.chunk(len(files)), strict=True):
            content = {"data": some.flatten(1).numpy(), form.labels: their.tolist(), "batch_label": "a part"}
            dump(directory / form.folder / file, content, protocol)
    return images


def write_idx(path: Path, array: np.ndarray[Any, np.dtype[np.uint8]], *, packed: bool = False) -> None:
    content = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    if packed:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)


def write_mnist(folder: Path, form: idx.Format, *, packed: bool = False) -> None:
    for part, each in (("train", form.train_each), ("t10k", form.test_each)):
        labels = np.arange(10, dtype=np.uint8).repeat(each)
        write_idx(folder / f"{part}-labels-idx1-ubyte", labels, packed=packed)
        write_idx(folder / f"{part}-images-idx3-ubyte", random_pixels(len(labels), 28, 28), packed=packed)


def write_picture(path: Path, pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Write pixels, [h, w, 3] or [h, w], as PNG whatever the name, so that they are read back to the bit."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, format="PNG")


def picture(name: str, number: int, side: int = 84) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Create the image of a class with a number."""
    return random_pixels(side, side, 3, seed=int(name[1:]) * 1000 + number)


def write_class_folders(root: Path, names: Sequence[str] = WORDNET_IDS, each: int = 7) -> None:
    for name in names:
        for number in range(each):
            write_picture(root / name / f"{name}{number:08d}.jpg", picture(name, number))
