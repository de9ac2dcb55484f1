"""Split miniImageNet: twenty tasks of five random classes, each with a head of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from sgp.benchmarks import settings as check
from sgp.benchmarks.benchmark import Benchmark
from sgp.benchmarks.datasets import miniimagenet
from sgp.benchmarks.datasets.images import find_data_folder
from sgp.benchmarks.stream import ClassGroup, Stream, normalize, split_classes

TASKS = 20
CLASSES = 5
# Mean and deviation of ImageNet.
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


@dataclass(frozen=True)
class SplitMiniImageNet:
    """miniImageNet in tasks of five classes, drawn by a seed."""

    tasks: int = TASKS
    """Number of tasks to learn, from 1 to 20."""
    class_seed: int | None = None
    """Seed that draws the classes of each task; none: the run's seed."""
    validation: float = 0.05
    """Fraction of each task's training images to hold out for validation, in [0, 1)."""
    validation_seed: int | None = None
    """Seed that draws the validation images; none: the run's seed."""

    def __post_init__(self) -> None:
        check.in_range("tasks", self.tasks, 1, TASKS)
        check.seed("class_seed", self.class_seed)
        check.share("validation", self.validation)
        check.seed("validation_seed", self.validation_seed)


def get_shape(settings: SplitMiniImageNet) -> tuple[tuple[int, ...], list[int]]:
    """Return the shape of one image and the number of classes of each head."""
    return (3, miniimagenet.SIDE, miniimagenet.SIDE), [CLASSES] * settings.tasks


def load_stream(settings: SplitMiniImageNet, data: Path | None, seed: int) -> Stream:
    """Load the tasks from the files of the data set."""
    images = miniimagenet.read(find_data_folder(data, miniimagenet.NAME))
    drawn = draw_classes(seed if settings.class_seed is None else settings.class_seed)[: settings.tasks]
    groups = [ClassGroup(f"classes {' '.join(map(str, own))}", task, own) for task, own in enumerate(drawn)]
    prepare = partial(normalize, mean=MEAN, deviation=DEVIATION)
    return split_classes(images, groups, get_shape(settings), prepare, settings, seed)


def draw_classes(seed: int) -> list[list[int]]:
    """Draw the classes of each task, as positions in the sorted list of WordNet ids.

    ACL's and TRGP's code draws them in the same way, but numbers the classes as in a data file that is not published.
    """
    order = np.random.RandomState(seed).permutation(TASKS * CLASSES)
    groups: list[list[int]] = order.reshape(TASKS, CLASSES).tolist()
    return groups


BENCHMARK = Benchmark(
    name="split-miniimagenet",
    description="miniImageNet in twenty tasks of five classes.",
    settings=SplitMiniImageNet,
    stream=load_stream,
    shape=get_shape,
    network="resnet18",
    datasets=(miniimagenet.NAME,),
)
