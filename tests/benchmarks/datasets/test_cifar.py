"""CIFAR files are read as published and identified in any order of their rows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.written import SMALL_CIFAR, SMALL_CIFAR10, are_equal, dump, image_set, write_cifar
from hypothesis import given
from hypothesis import strategies as st

from sgp.benchmarks.datasets import cifar
from sgp.benchmarks.datasets.images import DamagedData, MissingData


@pytest.mark.parametrize("form", [SMALL_CIFAR, SMALL_CIFAR10], ids=lambda form: form.name)
@pytest.mark.parametrize("inside", [False, True], ids=["beside", "inside"])
@pytest.mark.parametrize("protocol", [2, 5])
def test_written_data_is_read_back(tmp_path: Path, form: cifar.Format, inside: bool, protocol: int) -> None:
    written = write_cifar(tmp_path, form, protocol)
    read = cifar.read(tmp_path / form.folder if inside else tmp_path, form)
    assert are_equal(read, written)
    assert read.train.shape[1:] == (3, 32, 32)
    assert read.train.dtype == torch.uint8
    assert read.train_labels.dtype == torch.int64


@given(st.randoms(use_true_random=False))
def test_the_digest_does_not_depend_on_the_order_of_images(random: object) -> None:
    images = image_set(classes=5, train_each=4, test_each=1)
    order = list(range(len(images.train)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert cifar.digest_images(images.train, images.train_labels) == cifar.digest_images(
        images.train[order], images.train_labels[order]
    )


def test_the_digest_depends_on_every_pixel_and_label() -> None:
    images = image_set(classes=5, train_each=4, test_each=1)
    before = cifar.digest_images(images.train, images.train_labels)
    pixels, labels = images.train.clone(), images.train_labels.clone()
    pixels[7, 2, 31, 31] ^= 1
    assert cifar.digest_images(pixels, labels) != before
    labels[[0, 1]] = torch.tensor([4, 0]) if labels[0] != 4 else torch.tensor([0, 4])
    assert cifar.digest_images(images.train, labels) != before


def test_other_images_in_the_right_number_raise_an_error(tmp_path: Path) -> None:
    written = write_cifar(tmp_path, SMALL_CIFAR)
    parts = ((written.train, written.train_labels), (written.test, written.test_labels))
    train, test = (cifar.digest_images(*part) for part in parts)
    form = replace(SMALL_CIFAR, train=replace(SMALL_CIFAR.train, digest=train))
    assert cifar.read(tmp_path, replace(form, test=replace(form.test, digest=test)))
    with pytest.raises(DamagedData, match=r"test.* not the published ones"):
        cifar.read(tmp_path, replace(form, test=replace(form.test, digest=train)))


def test_a_missing_data_set_is_reported_with_the_command_to_download_it(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="sgp data get cifar100"):
        cifar.read(tmp_path)
    (tmp_path / "cifar-100-python.tar.gz").touch()
    with pytest.raises(MissingData, match=r"unpack .*cifar-100-python.tar.gz"):
        cifar.read(tmp_path)


def test_a_missing_class_or_image_raises_an_error(tmp_path: Path) -> None:
    write_cifar(tmp_path, SMALL_CIFAR)
    with pytest.raises(DamagedData, match=r"train.* has 4 images of class 'class 0' and should have 5"):
        cifar.read(tmp_path, replace(SMALL_CIFAR, train=replace(SMALL_CIFAR.train, each=5)))
    with pytest.raises(DamagedData, match="does not name 4 classes"):
        cifar.read(tmp_path, replace(SMALL_CIFAR, classes=4))


@pytest.mark.parametrize("file", ["train", "test", "meta"])
def test_a_truncated_or_missing_file_is_named_in_the_error(tmp_path: Path, file: str) -> None:
    write_cifar(tmp_path, SMALL_CIFAR)
    path = tmp_path / SMALL_CIFAR.folder / file
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DamagedData, match=f"{file}' is truncated"):
        cifar.read(tmp_path, SMALL_CIFAR)
    path.unlink()
    with pytest.raises(DamagedData if file != "train" else MissingData, match=file):
        cifar.read(tmp_path, SMALL_CIFAR)


@pytest.mark.parametrize("content", [{}, {"data": [1], "fine_labels": [1]}, {"data": torch.zeros(2, 5).numpy()}])
def test_a_file_of_something_else_is_named_in_the_error(tmp_path: Path, content: dict[str, object]) -> None:
    write_cifar(tmp_path, SMALL_CIFAR)
    dump(tmp_path / SMALL_CIFAR.folder / "test", content)
    with pytest.raises(DamagedData, match="test' is not a file of cifar100 images"):
        cifar.read(tmp_path, SMALL_CIFAR)


def test_a_label_without_a_class_raises_an_error(tmp_path: Path) -> None:
    write_cifar(tmp_path, SMALL_CIFAR)
    rows = torch.zeros(6, 3072, dtype=torch.uint8).numpy()
    dump(tmp_path / SMALL_CIFAR.folder / "test", {"data": rows, "fine_labels": [0, 0, 1, 1, 2, 3]})
    with pytest.raises(DamagedData, match="label outside"):
        cifar.read(tmp_path, SMALL_CIFAR)


@pytest.mark.slow
def test_the_real_files_are_complete_and_a_damaged_pixel_changes_the_digest(real_data: Path) -> None:
    try:
        images = cifar.read(real_data)
    except MissingData as missing:
        pytest.skip(f"CIFAR-100 is not in $SGP_DATA: {missing}")
    assert images.classes[:2] == ["apple", "aquarium_fish"]
    images.test[5, 0, 3, 4] ^= 128
    assert cifar.digest_images(images.test, images.test_labels) != cifar.CIFAR100.test.digest
