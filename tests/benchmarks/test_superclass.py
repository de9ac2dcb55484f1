"""CIFAR-100 Superclass: the five orders, heads by superclass, and the published scramble of pixels."""

from pathlib import Path

import pytest
import torch
from benchmarks.written import random_pixels

from sgp.benchmarks.datasets import pickles
from sgp.benchmarks.datasets.images import ImageSet
from sgp.benchmarks.superclass import ORDERS, SUPERCLASSES, Superclass, load_stream, scale, scale_scrambled


def test_every_class_belongs_to_one_superclass() -> None:
    members = [label for labels in SUPERCLASSES.values() for label in labels]
    assert sorted(members) == list(range(100))
    assert all(labels == tuple(sorted(labels)) for labels in SUPERCLASSES.values())


def test_orders_are_permutations() -> None:
    assert len(ORDERS) == 5
    assert all(sorted(order) == list(range(20)) for order in ORDERS)
    assert len(set(ORDERS)) == 5


@pytest.mark.parametrize("order", range(5))
def test_the_head_is_the_superclass_and_the_position_comes_from_the_order(
    cifar100: ImageSet, tmp_path: Path, order: int
) -> None:
    given = load_stream(Superclass(order=order), tmp_path, 0)
    assert (len(given), given.inputs, list(given.heads)) == (20, (3, 32, 32), [5] * 20)
    assert tuple(given[0].test.inputs.shape[1:]) == given.inputs
    names = list(SUPERCLASSES)
    for position, head in enumerate(ORDERS[order]):
        task = given[position]
        assert (task.head, task.name, given.names[position]) == (head, names[head], names[head])
        members = torch.tensor(SUPERCLASSES[names[head]])
        mine = torch.isin(cifar100.test_labels, members)
        # The label is the rank of the class among the five, and the images are in file order.
        assert torch.equal(members[task.test.labels], cifar100.test_labels[mine])
        assert torch.equal(task.test.inputs, cifar100.test[mine].float() / 255)
        assert (len(task.train), len(task.validation)) == (38, 2)


def test_fewer_tasks_are_the_first_ones_with_the_same_heads(cifar100: ImageSet, tmp_path: Path) -> None:
    few = load_stream(Superclass(tasks=2, order=1), tmp_path, 0)
    assert list(few.names) == ["reptiles", "medium_mammals"]
    assert len(few.heads) == 20
    assert few[1].head == 12


def test_scrambled_pixels_are_those_of_the_published_code() -> None:
    planar = torch.from_numpy(random_pixels(2, 3072))
    new = scale_scrambled(planar.view(-1, 3, 32, 32))
    for image, flat in zip(new.tolist(), scale(planar).tolist(), strict=True):
        for channel in range(3):
            for row in range(32):
                for column in range(32):
                    assert image[channel][row][column] == flat[96 * row + 3 * column + channel]


def test_only_the_pixels_are_scrambled(cifar100: ImageSet, tmp_path: Path) -> None:
    true, other = load_stream(Superclass(), tmp_path, 0)[0], load_stream(Superclass(pixels="scrambled"), tmp_path, 0)[0]
    assert torch.equal(true.train.labels, other.train.labels)
    for part in ("train", "validation", "test"):
        a, b = getattr(true, part).inputs, getattr(other, part).inputs
        assert not torch.equal(a, b)
        assert torch.equal(scale_scrambled((255 * a).round().to(torch.uint8)), b)


def test_superclasses_are_those_of_the_real_files(real_data: Path) -> None:
    folder = real_data / "cifar-100-python"
    if not folder.is_dir():
        pytest.skip("there is no cifar-100-python in $SGP_DATA")
    assert list(SUPERCLASSES) == pickles.read(folder / "meta")["coarse_label_names"]
    content = pickles.read(folder / "test")
    superclass_of = {label: number for number, labels in enumerate(SUPERCLASSES.values()) for label in labels}
    assert [superclass_of[label] for label in content["fine_labels"]] == content["coarse_labels"]
