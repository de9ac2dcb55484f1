"""5-datasets has the published order and constants, and pads grey images of 28 x 28 pixels."""

from pathlib import Path

import pytest
import torch
from benchmarks.written import image_set
from torch.nn import functional as F

from sgp.benchmarks.datasets import cifar, idx, notmnist, svhn
from sgp.benchmarks.datasets.images import ImageSet, MissingData
from sgp.benchmarks.five_datasets import FiveDatasets, load_stream


@pytest.fixture
def sets(monkeypatch: pytest.MonkeyPatch) -> dict[str, ImageSet]:
    colour = image_set(classes=10, train_each=10, test_each=2)
    digits = image_set(classes=10, train_each=12, test_each=2, side=28, channels=1)
    clothes = image_set(classes=10, train_each=14, test_each=2, side=28, channels=1)
    letters = image_set(classes=10, train_each=16, test_each=2, channels=1)
    monkeypatch.setattr(cifar, "read", lambda directory, form: colour)
    monkeypatch.setattr(svhn, "read", lambda directory: colour)
    monkeypatch.setattr(notmnist, "read", lambda directory: letters)
    monkeypatch.setattr(idx, "read", lambda directory, form: digits if form is idx.MNIST else clothes)
    return {"CIFAR-10": colour, "MNIST": digits, "SVHN": colour, "FashionMNIST": clothes, "notMNIST": letters}


MEANS = {"CIFAR-10": 125.3 / 255, "MNIST": 0.1, "SVHN": 0.4377, "FashionMNIST": 0.219, "notMNIST": 0.4254}
DEVIATIONS = {"CIFAR-10": 63 / 255, "MNIST": 0.2752, "SVHN": 0.198, "FashionMNIST": 0.3318, "notMNIST": 0.4501}


def test_each_data_set_is_a_task_of_ten_classes(sets: dict[str, ImageSet], tmp_path: Path) -> None:
    given = load_stream(FiveDatasets(), tmp_path, 0)
    assert list(given.names) == list(sets)
    assert (given.inputs, list(given.heads)) == ((3, 32, 32), [10] * 5)
    assert tuple(given[0].test.inputs.shape[1:]) == given.inputs
    for position, (name, images) in enumerate(sets.items()):
        task = given[position]
        assert (task.name, task.head) == (name, position)
        assert len(task.validation) == int(0.05 * len(images.train))
        assert len(task.train) + len(task.validation) == len(images.train)
        assert task.test.inputs.shape == (20, 3, 32, 32)
        assert torch.equal(task.test.labels, images.test_labels)
        first = images.test[:, 0]
        if first.shape[-1] == 28:
            first = F.pad(first, (2, 2, 2, 2))
        expected = (first.float() / 255 - MEANS[name]) / DEVIATIONS[name]
        torch.testing.assert_close(task.test.inputs[:, 0], expected)
        if images.test.shape[1] == 1:
            assert torch.equal(task.test.inputs[:, 0], task.test.inputs[:, 2])


def test_the_published_fourth_task_is_mnist_with_the_constants_of_fashionmnist(
    sets: dict[str, ImageSet], tmp_path: Path
) -> None:
    task = load_stream(FiveDatasets(fashion="digits"), tmp_path, 0)[3]
    assert torch.equal(task.test.labels, sets["MNIST"].test_labels)
    assert float(task.test.inputs[:, :, 0, 0].mean()) == pytest.approx(-0.219 / 0.3318, abs=1e-6)


def test_validation_images_do_not_depend_on_the_runs_seed_unless_asked(
    sets: dict[str, ImageSet], tmp_path: Path
) -> None:
    def load_validation(settings: FiveDatasets, seed: int) -> torch.Tensor:
        return load_stream(settings, tmp_path, seed)[0].validation.inputs

    assert torch.equal(load_validation(FiveDatasets(), 3), load_validation(FiveDatasets(), 4))
    asked = FiveDatasets(validation_seed=None)
    assert torch.equal(load_validation(asked, 1), load_validation(FiveDatasets(), 3))
    assert not torch.equal(load_validation(asked, 3), load_validation(asked, 4))


def test_a_missing_data_set_is_reported_before_the_first_task(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="cifar-10"):
        load_stream(FiveDatasets(), tmp_path, 0)
