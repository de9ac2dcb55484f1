"""Fixtures: a cache for each test, and the real data sets if they are available."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.written import image_set

from sgp.benchmarks.datasets import cifar
from sgp.benchmarks.datasets.images import ImageSet


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use a cache of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SGP_CACHE", str(folder))
    yield folder
    # Those of miniImageNet take a gigabyte.
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def real_data() -> Path:
    """Return the folder of $SGP_DATA, or skip the test."""
    if not os.environ.get("SGP_DATA"):
        pytest.skip("set $SGP_DATA to a folder that holds the real data sets")
    return Path(os.environ["SGP_DATA"])


@pytest.fixture
def cifar100(monkeypatch: pytest.MonkeyPatch) -> ImageSet:
    """Replace CIFAR-100 by a small image set with its classes."""
    images = image_set(classes=100, train_each=8, test_each=2)
    monkeypatch.setattr(cifar, "read", lambda directory: images)
    return images
