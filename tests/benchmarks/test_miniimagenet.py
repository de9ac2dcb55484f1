"""Split miniImageNet draws the classes of a task as published and standardizes the images."""

from pathlib import Path

import pytest
import torch
from benchmarks.written import image_set

from sgp.benchmarks.datasets import miniimagenet
from sgp.benchmarks.datasets.images import ImageSet
from sgp.benchmarks.miniimagenet import SplitMiniImageNet, draw_classes, load_stream


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> ImageSet:
    made = image_set(classes=100, train_each=8, test_each=2, side=84)
    monkeypatch.setattr(miniimagenet, "read", lambda directory: made)
    return made


def test_classes_are_drawn_as_in_the_published_code() -> None:
    assert draw_classes(37)[:3] == [[61, 49, 86, 78, 5], [91, 81, 82, 89, 18], [66, 32, 27, 38, 47]]
    for seed in range(5):
        groups = draw_classes(seed)
        assert [len(group) for group in groups] == [5] * 20
        assert sorted(label for group in groups for label in group) == list(range(100))


@pytest.mark.parametrize(("class_seed", "drawn_by"), [(None, 4), (37, 37)])
def test_a_task_has_its_five_classes(images: ImageSet, tmp_path: Path, class_seed: int | None, drawn_by: int) -> None:
    given = load_stream(SplitMiniImageNet(class_seed=class_seed), tmp_path, 4)
    assert (len(given), given.inputs, list(given.heads)) == (20, (3, 84, 84), [5] * 20)
    assert tuple(given[0].test.inputs.shape[1:]) == given.inputs
    group = torch.tensor(draw_classes(drawn_by)[2])
    task = given[2]
    assert task.head == 2
    assert (len(task.train), len(task.validation), len(task.test)) == (38, 2, 10)
    mine = torch.isin(images.test_labels, group)
    assert torch.equal(group[task.test.labels], images.test_labels[mine])
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    deviation = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    torch.testing.assert_close(task.test.inputs, (images.test[mine].float() / 255 - mean) / deviation)


def test_classes_and_validation_have_separate_seeds(images: ImageSet, tmp_path: Path) -> None:
    fixed = SplitMiniImageNet(class_seed=1, validation_seed=2)
    first, second = load_stream(fixed, tmp_path, 3)[0], load_stream(fixed, tmp_path, 4)[0]
    assert torch.equal(first.validation.inputs, second.validation.inputs)
    other = load_stream(SplitMiniImageNet(class_seed=1), tmp_path, 3)[0]
    assert torch.equal(other.test.inputs, first.test.inputs)
    assert not torch.equal(other.validation.inputs, first.validation.inputs)
