"""Split CIFAR-100: ten classes a task in the order of their labels, pixels standardised as published."""

from pathlib import Path

import pytest
import torch

from sgp.benchmarks.datasets.images import ImageSet
from sgp.benchmarks.split_cifar100 import SplitCIFAR100, load_stream
from sgp.benchmarks.stream import Examples, hold_out


def test_a_task_has_ten_classes_and_all_their_images(cifar100: ImageSet, tmp_path: Path) -> None:
    given = load_stream(SplitCIFAR100(), tmp_path, 0)
    assert (len(given), given.inputs, list(given.heads)) == (10, (3, 32, 32), [10] * 10)
    assert tuple(given[0].test.inputs.shape[1:]) == given.inputs
    assert given.names[0] == "classes 0-9"
    for position in range(10):
        task = given[position]
        assert task.head == position
        assert (len(task.train), len(task.validation), len(task.test)) == (76, 4, 20)
        together = torch.cat([task.train.labels, task.validation.labels])
        assert together.bincount(minlength=10).tolist() == [8] * 10
        assert task.test.labels.bincount(minlength=10).tolist() == [2] * 10


def test_inputs_are_the_images_standardized_as_published(cifar100: ImageSet, tmp_path: Path) -> None:
    task = load_stream(SplitCIFAR100(), tmp_path, 0)[3]
    mine = (cifar100.test_labels >= 30) & (cifar100.test_labels < 40)
    mean = torch.tensor([125.3, 123.0, 113.9]).view(3, 1, 1)
    deviation = torch.tensor([63.0, 62.1, 66.7]).view(3, 1, 1)
    torch.testing.assert_close(task.test.inputs, (cifar100.test[mine].float() - mean) / deviation)
    assert torch.equal(task.test.labels, cifar100.test_labels[mine] - 30)


@pytest.mark.parametrize(("setting", "seed"), [(None, 5), (0, 0)])
def test_validation_images_are_drawn_by_the_runs_seed_or_their_own(
    cifar100: ImageSet, tmp_path: Path, setting: int | None, seed: int
) -> None:
    task = load_stream(SplitCIFAR100(validation_seed=setting), tmp_path, 5)[0]
    mine = torch.nonzero(cifar100.train_labels < 10).flatten()
    train, validation = hold_out(Examples(mine, cifar100.train_labels[mine]), 0.05, seed)
    assert torch.equal(task.validation.labels, validation.labels)
    assert torch.equal(task.train.labels, train.labels)


def test_fewer_tasks_are_the_first_ones(cifar100: ImageSet, tmp_path: Path) -> None:
    few, all_ = load_stream(SplitCIFAR100(tasks=2), tmp_path, 0), load_stream(SplitCIFAR100(), tmp_path, 0)
    assert len(few) == 2
    assert torch.equal(few[1].train.inputs, all_[1].train.inputs)
