"""Cache of images that take long to decode: one file per state of their sources, mapped into memory when read."""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sgp.benchmarks.datasets.images import ImageSet
from sgp.extras import import_extra

# Environment variable with the cache's folder, if it is not the system's.
VARIABLE = "SGP_CACHE"
# To be increased when the same sources are decoded to other tensors.
FORMAT = 1
TENSORS = ("train", "train_labels", "test", "test_labels")
# Age in seconds at which the file of a killed writer is removed.
ABANDONED = 3600


@dataclass(frozen=True)
class Source:
    """Files of an image set, and how to decode them.

    Attributes:
        root: Folder that contains the files.
        files: All files.
        decode: Function that reads and decodes them.
    """

    root: Path
    files: list[Path]
    decode: Callable[[], ImageSet]


def load_cached(name: str, source: Source) -> ImageSet:
    """Return the decoded images, from the cache if their files have not changed since they were decoded.

    The tensors are mapped from the cache's file, so that only the images that are used are read into memory. The files
    of the source are identified by name, size and modification time. A truncated file of the cache is replaced.

    Args:
        name: Name of the data set, for the name of the cache's file.
        source: Files to decode.
    """
    target = get_cache_folder() / f"{name}-{_digest_files(source)}.safetensors"
    cached = _read(target)
    if cached is not None:
        return cached
    decoded = source.decode()
    try:
        _write(target, decoded)
    except (OSError, SafetensorError) as error:
        warnings.warn(
            f"the decoded images of {name} cannot be cached in {str(target.parent)!r} ({error}), so they are decoded "
            f"each time: set ${VARIABLE} to a folder with free space",
            stacklevel=2,
        )
        return decoded
    return _read(target) or decoded


def get_cache_folder() -> Path:
    """Return the folder of the cache."""
    return Path(os.environ.get(VARIABLE) or import_extra("pooch").os_cache("sgp")).expanduser()


def _digest_files(source: Source) -> str:
    digest = hashlib.sha256(f"format {FORMAT}\n".encode())
    for path in sorted(source.files):
        status = path.stat()
        digest.update(f"{path.relative_to(source.root).as_posix()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def _read(path: Path) -> ImageSet | None:
    """Read the images of a file; None if it is missing, truncated or something else."""
    try:
        # Opening compares the header with the size of the file.
        with safe_open(path, framework="pt") as file:
            classes = json.loads((file.metadata() or {})["classes"])
            images = ImageSet(**{name: file.get_tensor(name) for name in TENSORS}, classes=classes)
    except (SafetensorError, KeyError, ValueError, OSError):
        return None
    pairs = ((images.train, images.train_labels), (images.test, images.test_labels))
    return images if all(p.dtype == torch.uint8 and len(p) == len(labels) for p, labels in pairs) else None


def _write(target: Path, images: ImageSet) -> None:
    """Write a file completely or not at all: to a temporary file, which is flushed and renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(".*.partial"):
        if time.time() - left.stat().st_mtime > ABANDONED:
            left.unlink(missing_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        tensors = {name: getattr(images, name).contiguous() for name in TENSORS}
        save_file(tensors, temporary, metadata={"classes": json.dumps(images.classes)})
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
