"""Images that take long to decode, kept decoded: one file per state of their sources, mapped into memory when read."""

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

from sgp.benchmarks.datasets.extra import need
from sgp.benchmarks.datasets.images import ImageSet

# Where decoded images are kept, if not where the system keeps such things.
VARIABLE = "SGP_CACHE"
# Raised when the same sources are to give other tensors.
FORMAT = 1
TENSORS = ("train", "train_labels", "test", "test_labels")
# A writer that was killed leaves its file behind; none writes for so many seconds.
ABANDONED = 3600


@dataclass(frozen=True)
class Source:
    """Files that images come from.

    Attributes:
        root: folder that they lie under.
        files: all of them.
        decode: reads and decodes them.
    """

    root: Path
    files: list[Path]
    decode: Callable[[], ImageSet]


def cached(name: str, source: Source) -> ImageSet:
    """The decoded images, from the cache if they are there and their files have not changed since.

    The tensors are mapped from the cache's file, so that only the images that are looked at come into memory. The
    source's files are known by name, size and time of change. A file of the cache that is not whole counts as none, and
    is written anew.

    Args:
        name: of the data set, for the cache's file.
        source: where the images come from.
    """
    target = folder() / f"{name}-{_state(source)}.safetensors"
    kept = _read(target)
    if kept is not None:
        return kept
    fresh = source.decode()
    try:
        _write(target, fresh)
    except (OSError, SafetensorError) as error:
        warnings.warn(
            f"{name} cannot be kept decoded in {str(target.parent)!r} ({error}) and is decoded anew each time: "
            f"set ${VARIABLE} to a folder with room",
            stacklevel=2,
        )
        return fresh
    return _read(target) or fresh


def folder() -> Path:
    """Where decoded images are kept."""
    return Path(os.environ.get(VARIABLE) or need("pooch").os_cache("sgp")).expanduser()


def _state(source: Source) -> str:
    """A digest of the files' names, sizes and times of change."""
    digest = hashlib.sha256(f"format {FORMAT}\n".encode())
    for path in sorted(source.files):
        status = path.stat()
        digest.update(f"{path.relative_to(source.root).as_posix()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def _read(path: Path) -> ImageSet | None:
    """The images of a file, or None if it is not there or not whole."""
    try:
        # Opening compares the header's promise with the size of the file.
        with safe_open(path, framework="pt") as file:
            classes = json.loads((file.metadata() or {})["classes"])
            train, train_labels, test, test_labels = (file.get_tensor(name) for name in TENSORS)
    except (SafetensorError, KeyError, ValueError, OSError):
        return None
    whole = (
        train.dtype == test.dtype == torch.uint8 and len(train) == len(train_labels) and len(test) == len(test_labels)
    )
    return ImageSet(train, train_labels, test, test_labels, classes) if whole else None


def _write(target: Path, images: ImageSet) -> None:
    """Whole or not at all: to a file beside, flushed, then renamed."""
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
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
