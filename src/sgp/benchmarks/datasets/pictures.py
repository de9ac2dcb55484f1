"""Image files to pixels."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sgp.benchmarks.datasets.extra import need
from sgp.benchmarks.datasets.images import DamagedData

SUFFIXES = {".jpg", ".jpeg", ".png"}


def listed(folder: Path) -> list[Path]:
    """The image files of a folder, sorted by name."""
    return sorted(
        path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
    )


def decoded(paths: Sequence[Path], mode: str, side: int, resample: str) -> Tensor:
    """The images as [n, c, side, side], uint8, each resized if it has another size.

    Args:
        paths: the files.
        mode: Pillow's: "RGB" or "L".
        side: height and width.
        resample: how to resize, Pillow's: "BILINEAR", "LANCZOS".
    """
    image_module = need("PIL.Image")
    method = image_module.Resampling[resample]
    channels = len(mode)
    out = np.empty((len(paths), channels, side, side), np.uint8)

    def decode(row: int) -> None:
        try:
            with image_module.open(paths[row]) as opened:
                image = opened if opened.mode == mode else opened.convert(mode)
                if image.size != (side, side):
                    image = image.resize((side, side), method)
                out[row] = np.asarray(image).reshape(side, side, channels).transpose(2, 0, 1)
        # Pillow fails in many ways, depending on where the damage is.
        except Exception as error:
            raise DamagedData(f"{str(paths[row])!r} is truncated or no image ({error}): get it again") from error

    # Pillow decodes outside of Python's lock.
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(decode, range(len(paths)), chunksize=1):
            pass
    return torch.from_numpy(out)
