"""Fetches the data sets that may be fetched, with the checksums that torchvision publishes for them."""

from __future__ import annotations

import os
import shutil
import tarfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from sgp.benchmarks.datasets import cifar, english, idx, miniimagenet, notmnist, svhn, texts
from sgp.benchmarks.datasets.check import READERS, Report, check_one
from sgp.benchmarks.datasets.extra import need
from sgp.benchmarks.datasets.images import DamagedData, DataError
from sgp.registry import UnknownName, unknown

# After the first try, of each file.
RETRIES = 2


@dataclass(frozen=True)
class Remote:
    """Where a data set is fetched from.

    Attributes:
        url: folder of the files.
        folder: that they are put in, under the one for all data sets.
        files: MD5 sum of each.
        unpacks_to: folder that the one file, an archive, unpacks to; None if the files are used as they are.
    """

    url: str
    folder: str
    files: dict[str, str]
    unpacks_to: str | None = None


REMOTES = {
    cifar.CIFAR100.name: Remote(
        "https://www.cs.toronto.edu/~kriz/",
        "",
        {"cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85"},
        unpacks_to=cifar.CIFAR100.folder,
    ),
    cifar.CIFAR10.name: Remote(
        "https://www.cs.toronto.edu/~kriz/",
        "",
        {"cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a"},
        unpacks_to=cifar.CIFAR10.folder,
    ),
    # Not from its first home, yann.lecun.com, which refuses.
    idx.MNIST.name: Remote(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "MNIST/raw",
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    idx.FASHION.name: Remote(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "FashionMNIST/raw",
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    svhn.NAME: Remote(
        "http://ufldl.stanford.edu/housenumbers/",
        "svhn",
        {
            "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
            "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
        },
    ),
}
BY_HAND = {
    miniimagenet.NAME: f"miniImageNet may not be handed on, nor fetched: lay it out as {miniimagenet.LAYOUTS}",
    texts.CLINC150: "CLINC150 has no file with a published checksum: put data_full.json and domains.json in clinc150/",
    texts.FIVETEXT: "fivetext is one file of ours, fivetext.json: put it in the folder",
    notmnist.NAME: f"notMNIST has no home with a checksum to fetch it from: lay it out as {notmnist.LAYOUTS}",
}


def get(name: str, directory: Path) -> Report:
    """Fetch a data set into a folder, unless it is there and whole, and check it.

    Raises:
        UnknownName: there is no data set of this name.
        DataError: it cannot be fetched, or what was fetched is not whole; the message says what to do.
    """
    if name not in READERS:
        raise UnknownName(unknown("data set", name, READERS))
    if directory.is_dir():
        report = check_one(name, directory)
        if report.state == "complete":
            return report
    if name in BY_HAND:
        raise DataError(BY_HAND[name])
    if name == english.NAME:
        english.download(directory)
    else:
        _fetch_all(REMOTES[name], directory)
    report = check_one(name, directory)
    if report.state != "complete":
        raise DamagedData(report.detail)
    return report


def _fetch_all(remote: Remote, directory: Path) -> None:
    for file in remote.files:
        path = _fetch(remote, file, directory / remote.folder)
        if remote.unpacks_to is not None:
            _unpack(path, directory / remote.unpacks_to)


def _fetch(remote: Remote, file: str, folder: Path) -> Path:
    """The file, from where it lies with the right checksum or else from afar."""
    pooch = need("pooch")
    url = remote.url + file
    try:
        source = pooch.create(
            path=folder,
            base_url=remote.url,
            registry={file: f"md5:{remote.files[file]}"},
            retry_if_failed=RETRIES,
        )
        return Path(source.fetch(file))
    # What requests raises is an OSError; a wrong checksum is a ValueError.
    except (OSError, ValueError) as error:
        reason = "its checksum is not the published one" if type(error) is ValueError else type(error).__name__
        raise DataError(
            f"cannot fetch {url} ({reason}): try again later, or fetch it elsewhere, put it at {str(folder / file)!r} "
            "and give the same command again"
        ) from error


def _unpack(archive: Path, target: Path) -> None:
    """The folder of an archive, whole or not at all: unpacked beside, then renamed."""
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        with tarfile.open(archive) as file:
            # Refuses links, devices and paths that lead out.
            file.extractall(temporary, filter="data")
        if not (temporary / target.name).is_dir():
            raise DamagedData(f"{str(archive)!r} holds no folder {target.name}: get it again")
        before = temporary / "before"
        if target.exists():
            os.replace(target, before)
        try:
            os.replace(temporary / target.name, target)
        except OSError:
            if before.exists():
                os.replace(before, target)
            raise
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DamagedData(f"{str(archive)!r} cannot be unpacked ({error}): remove it and get it again") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
