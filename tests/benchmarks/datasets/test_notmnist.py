"""notMNIST as folders of PNG files and as pickles."""

from pathlib import Path

import numpy as np
import pytest
from benchmarks.written import dump, random_pixels, write_picture

from sgp.benchmarks.datasets import notmnist
from sgp.benchmarks.datasets.images import DamagedData, MissingData

pytest.importorskip("PIL", reason="of the extra 'benchmarks'")


def write(root: Path, each: int) -> None:
    for number, name in enumerate("ABCDEFGHIJ"):
        for file in range(each):
            write_picture(root / name / f"{file:03}.png", random_pixels(28, 28, seed=100 * number + file))


@pytest.mark.parametrize("folder", ["notMNIST", "notmnist", "."])
def test_split_folders_are_read(tmp_path: Path, folder: str) -> None:
    write(tmp_path / folder / "Train", 3)
    write(tmp_path / folder / "Test", 2)
    images = notmnist.read(tmp_path)
    assert images.train.shape == (30, 1, 32, 32)
    assert images.test.shape == (20, 1, 32, 32)
    assert images.train_labels.tolist() == [label for label in range(10) for _ in range(3)]


def test_one_set_of_folders_is_split_in_the_same_way_every_time(tmp_path: Path) -> None:
    write(tmp_path / "notMNIST_small", 5)
    first, second = notmnist.read(tmp_path), notmnist.decode(tmp_path)
    assert (len(first.train), len(first.test)) == (45, 5)
    assert first.test_labels.tolist() == second.test_labels.tolist()
    order = np.random.RandomState(42).permutation(50)[:5]
    assert first.test_labels.tolist() == [row // 5 for row in sorted(order)]


def test_the_two_unreadable_files_are_skipped_and_others_raise_an_error(tmp_path: Path) -> None:
    write(tmp_path / "notMNIST_small", 5)
    for letter, name in notmnist.UNREADABLE:
        (tmp_path / "notMNIST_small" / letter / name).touch()
    assert len(notmnist.read(tmp_path).train) == 45
    (tmp_path / "notMNIST_small" / "C" / "broken.png").touch()
    with pytest.raises(DamagedData, match=r"C/broken.png' is truncated or not an image"):
        notmnist.read(tmp_path)


def test_the_pickles_of_the_published_code_are_read(tmp_path: Path) -> None:
    for part, count in (("train", 40), ("test", 20)):
        labels = np.arange(count, dtype=np.uint8) % 10
        content = {"features": random_pixels(count, 1, 32, 32), "labels": labels}
        dump(tmp_path / "notmnist" / f"notmnist_{part}.pkl", content)
    images = notmnist.read(tmp_path)
    np.testing.assert_array_equal(images.train.numpy(), random_pixels(40, 1, 32, 32))
    assert images.test_labels.tolist() == [*range(10), *range(10)]
    dump(tmp_path / "notmnist" / "notmnist_test.pkl", {"features": 1})
    with pytest.raises(DamagedData, match=r"notmnist_test.pkl' is not a file of notMNIST"):
        notmnist.read(tmp_path)


def test_errors_name_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="notMNIST_small"):
        notmnist.read(tmp_path)
    write(tmp_path / "notMNIST" / "Train", 1)
    with pytest.raises(DamagedData, match="Test/A"):
        notmnist.read(tmp_path)
    write(tmp_path / "notMNIST" / "Test", 1)
    (tmp_path / "notMNIST" / "Test" / "J" / "000.png").unlink()
    with pytest.raises(DamagedData, match=r"no images in .*Test/J"):
        notmnist.read(tmp_path)
