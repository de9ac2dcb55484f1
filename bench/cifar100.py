"""Split CIFAR-100 from the published pickles: ten tasks of ten classes."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

# What the published pickles need to be read and nothing more: an array is made by numpy's own constructor,
# whose module numpy has renamed since.
_reconstruct = np.empty(0).__reduce__()[0]
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}

MEAN = torch.tensor([125.3, 123.0, 113.9]).view(1, 3, 1, 1)
STD = torch.tensor([63.0, 62.1, 66.7]).view(1, 3, 1, 1)


class _Unpickler(pickle.Unpickler):
    """Reads arrays, numbers, strings and their containers; refuses everything else by name."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a CIFAR-100 file") from None


def _load(file: BinaryIO) -> dict[bytes, Any]:
    content: dict[bytes, Any] = _Unpickler(file, encoding="bytes").load()
    return content


@dataclass(frozen=True)
class Task:
    """Ten classes. Images are [n, 3, 32, 32], normalised; labels are 0..9; validation is 5 % of the
    training set."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def split(directory: Path, tasks: int, seed: int) -> list[Task]:
    """The first tasks in the order of the labels; the seed draws the validation images."""
    parts: dict[str, tuple[Tensor, Tensor]] = {}
    for part in ("train", "test"):
        with open(directory / part, "rb") as file:
            content = _load(file)
        pixels = torch.from_numpy(content[b"data"]).view(-1, 3, 32, 32)
        parts[part] = pixels, torch.tensor(content[b"fine_labels"])

    out = []
    for task in range(tasks):
        images, labels = _of_task(parts["train"], task)
        order = torch.from_numpy(np.random.RandomState(seed).permutation(len(labels)))
        held_out = len(labels) // 20
        out.append(
            Task(
                train=(images[order[held_out:]], labels[order[held_out:]]),
                validation=(images[order[:held_out]], labels[order[:held_out]]),
                test=_of_task(parts["test"], task),
            )
        )
    return out


def _of_task(part: tuple[Tensor, Tensor], task: int) -> tuple[Tensor, Tensor]:
    pixels, labels = part
    mine = (labels // 10) == task
    return (pixels[mine].float() - MEAN) / STD, labels[mine] % 10
