"""IDX files are read plain and packed, in the folders of torchvision or others, and damaged ones raise errors."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.written import SMALL_MNIST, random_pixels, write_idx, write_mnist

from sgp.benchmarks.datasets import idx
from sgp.benchmarks.datasets.images import DamagedData, MissingData


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("folder", SMALL_MNIST.folders)
def test_written_data_is_read_back(tmp_path: Path, folder: str, packed: bool) -> None:
    write_mnist(tmp_path / folder, SMALL_MNIST, packed=packed)
    images = idx.read(tmp_path, SMALL_MNIST)
    assert images.train.shape == (75, 1, 28, 28)
    assert images.train.dtype == torch.uint8
    assert images.train_labels.bincount().tolist() == list(SMALL_MNIST.train_each)
    assert images.test_labels.dtype == torch.int64
    np.testing.assert_array_equal(images.test.numpy()[:, 0], random_pixels(20, 28, 28))
    assert images.classes == list("0123456789")


def test_the_published_counts_add_up() -> None:
    for form in (idx.MNIST, idx.FASHION):
        assert (sum(form.train_each), sum(form.test_each), len(form.classes)) == (60000, 10000, 10)


def test_a_missing_data_set_is_reported_with_the_command_to_download_it(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="sgp data get fashion-mnist"):
        idx.read(tmp_path, idx.FASHION)


def test_a_data_set_in_the_folder_of_the_other_raises_an_error(tmp_path: Path) -> None:
    # Only the labels are looked at before it is noticed.
    for part, form_each in (("train", idx.MNIST.train_each), ("t10k", idx.MNIST.test_each)):
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", np.arange(10, dtype=np.uint8).repeat(form_each))
    with pytest.raises(MissingData, match="those of mnist, not of fashion-mnist"):
        idx.read(tmp_path, idx.FASHION)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_a_truncated_or_missing_file_is_named_in_the_error(tmp_path: Path, name: str, packed: bool) -> None:
    write_mnist(tmp_path, SMALL_MNIST, packed=packed)
    path = tmp_path / (f"{name}.gz" if packed else name)
    whole = path.read_bytes()
    for size in (len(whole) - 5, 10, 3, 0):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedData, match=name):
            idx.read(tmp_path, SMALL_MNIST)
    path.unlink()
    with pytest.raises(DamagedData, match=f"there is no {name}"):
        idx.read(tmp_path, SMALL_MNIST)


def test_a_file_of_another_type_raises_an_error(tmp_path: Path) -> None:
    write_mnist(tmp_path, SMALL_MNIST)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(bytes([0, 0, 13, 3]) + bytes(100))
    with pytest.raises(DamagedData, match="not an IDX file"):
        idx.read(tmp_path, SMALL_MNIST)


def test_counts_and_shapes_are_checked(tmp_path: Path) -> None:
    write_mnist(tmp_path, SMALL_MNIST)
    with pytest.raises(DamagedData, match="has 2 images of class '0' and should have 3"):
        idx.read(tmp_path, replace(SMALL_MNIST, test_each=(3,) * 10))
    write_idx(tmp_path / "t10k-images-idx3-ubyte", random_pixels(20, 27, 28))
    with pytest.raises(DamagedData, match=r"shape \(20, 27, 28\)"):
        idx.read(tmp_path, SMALL_MNIST)
