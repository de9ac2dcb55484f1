"""SVHN is read from its MATLAB files."""

from pathlib import Path

import numpy as np
import pytest
from benchmarks.written import random_pixels

from sgp.benchmarks.datasets import svhn
from sgp.benchmarks.datasets.images import DamagedData, MissingData

io = pytest.importorskip("scipy.io", reason="of the extra 'benchmarks'")

SMALL = svhn.Counts(train=(3,) * 10, test=(1,) * 10)


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for part, each in (("train", 3), ("test", 1)):
        # The digit 0 is class 10 there.
        labels = np.arange(1, 11, dtype=np.uint8).repeat(each)[:, None]
        pixels = random_pixels(32, 32, 3, len(labels))
        io.savemat(folder / f"{part}_32x32.mat", {"X": pixels, "y": labels}, do_compression=True)


@pytest.mark.parametrize("folder", ["svhn", "."])
def test_written_data_is_read_back(tmp_path: Path, folder: str) -> None:
    write(tmp_path / folder)
    images = svhn.read(tmp_path, SMALL)
    assert images.train.shape == (30, 3, 32, 32)
    np.testing.assert_array_equal(images.test[4].numpy(), random_pixels(32, 32, 3, 10)[..., 4].transpose(2, 0, 1))
    assert images.test_labels.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]


def test_the_published_counts_add_up() -> None:
    assert (sum(svhn.PUBLISHED.train), sum(svhn.PUBLISHED.test)) == (73257, 26032)


def test_errors_name_the_file_and_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="sgp data get svhn"):
        svhn.read(tmp_path)
    write(tmp_path)
    with pytest.raises(DamagedData, match="has 3 images of class '0' and should have 4948"):
        svhn.read(tmp_path)
    path = tmp_path / "test_32x32.mat"
    whole = path.read_bytes()
    for size in (len(whole) - 100, 200, 50, 0):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedData, match=r"test_32x32.mat' is truncated"):
            svhn.read(tmp_path, SMALL)
    path.unlink()
    with pytest.raises(DamagedData, match=r"there is no file .*test_32x32.mat"):
        svhn.read(tmp_path, SMALL)
    io.savemat(path, {"X": np.zeros((4, 4, 3, 2), np.uint8), "y": [[1], [2]]})
    with pytest.raises(DamagedData, match="no images of 32 x 32"):
        svhn.read(tmp_path, SMALL)
