"""Decoding of image files."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sgp.benchmarks.datasets.images import DamagedData
from sgp.extras import import_extra

SUFFIXES = {".jpg", ".jpeg", ".png"}


def list_pictures(folder: Path) -> list[Path]:
    """Return the image files of a folder, sorted by name."""
    return sorted(
        path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
    )


def decode_pictures(paths: Sequence[Path], mode: str, side: int, resample: str) -> Tensor:
    """Decode image files to [n, c, side, side], uint8, and resize those of another size.

    A file that cannot be decoded raises DamagedData.

    Args:
        paths: Image files.
        mode: Mode of Pillow: "RGB" or "L".
        side: Height and width.
        resample: Resampling filter of Pillow, such as "BILINEAR" or "LANCZOS".
    """
    pillow = import_extra("PIL.Image")
    channels = len(mode)
    images = np.empty((len(paths), channels, side, side), np.uint8)

    def decode(row: int) -> None:
        try:
            with pillow.open(paths[row]) as opened:
                image = opened if opened.mode == mode else opened.convert(mode)
                if image.size != (side, side):
                    image = image.resize((side, side), pillow.Resampling[resample])
                images[row] = np.asarray(image).reshape(side, side, channels).transpose(2, 0, 1)
        # Pillow fails in many ways, depending on where the damage is.
        except Exception as error:
            raise DamagedData(
                f"{str(paths[row])!r} is truncated or not an image ({error}): download it again"
            ) from error

    # Pillow releases Python's lock while it decodes.
    with ThreadPoolExecutor() as pool:
        list(pool.map(decode, range(len(paths))))
    return torch.from_numpy(images)
