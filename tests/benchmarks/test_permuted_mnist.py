"""Permuted MNIST: orders of pixels as the published code draws them, and its validation images."""

from pathlib import Path

import pytest
import torch
from benchmarks.written import image_set

from sgp.benchmarks.datasets import idx
from sgp.benchmarks.datasets.images import ImageSet
from sgp.benchmarks.permuted_mnist import PermutedMNIST, draw_pixel_orders, load_stream


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> ImageSet:
    made = image_set(classes=10, train_each=10, test_each=2, side=28, channels=1)
    monkeypatch.setattr(idx, "read", lambda directory, form: made)
    return made


@pytest.mark.parametrize("seed", [0, 1, 37])
def test_orders_of_pixels_are_those_of_the_published_code(seed: int) -> None:
    utils = pytest.importorskip("sklearn.utils", reason="of the extra 'benchmarks'")
    numbers = utils.shuffle(list(range(10)), random_state=seed)
    orders = draw_pixel_orders(10, 784, seed)
    for index, number in enumerate(numbers):
        assert orders[index].tolist() == utils.shuffle(list(range(784)), random_state=number * 100 + index)


def test_fewer_tasks_are_the_first_ones_and_seeds_differ() -> None:
    assert all(
        torch.equal(a, b) for a, b in zip(draw_pixel_orders(3, 784, 5), draw_pixel_orders(10, 784, 5), strict=False)
    )
    assert not all(
        torch.equal(a, b) for a, b in zip(draw_pixel_orders(10, 784, 5), draw_pixel_orders(10, 784, 6), strict=True)
    )


def test_all_images_are_in_each_task_and_the_first_tenth_is_for_validation(images: ImageSet, tmp_path: Path) -> None:
    given = load_stream(PermutedMNIST(), tmp_path, 2)
    assert (len(given), given.inputs, list(given.heads)) == (10, (784,), [10])
    assert tuple(given[0].test.inputs.shape[1:]) == given.inputs
    for position in (0, 9):
        task = given[position]
        assert task.head == 0
        assert torch.equal(task.validation.labels, images.train_labels[:10])
        assert torch.equal(task.train.labels, images.train_labels[10:])
        order = draw_pixel_orders(10, 784, 2)[position]
        scaled = (images.train.flatten(1).float() / 255 - 0.1307) / 0.3081
        torch.testing.assert_close(task.train.inputs, scaled[10:, order])
        torch.testing.assert_close(task.validation.inputs, scaled[:10, order])
        assert task.test.inputs.shape == (20, 784)
