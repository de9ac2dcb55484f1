"""Download of data sets that may be downloaded, with the checksums that torchvision publishes for them."""

from __future__ import annotations

import os
import shutil
import tarfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from sgp.benchmarks.datasets import cifar, english, idx, miniimagenet, notmnist, svhn, texts
from sgp.benchmarks.datasets.check import READERS, Report, check_one
from sgp.benchmarks.datasets.images import DamagedData, DataError
from sgp.extras import import_extra
from sgp.registry import UnknownName, unknown

# Attempts per file after the first.
RETRIES = 2


@dataclass(frozen=True)
class Remote:
    """Location of a data set.

    Attributes:
        url: Address of the folder of the files.
        folder: Folder to store them in, within the folder of all data sets.
        files: MD5 sum of each file.
        unpacks_to: Folder in the archive, if the only file is one.
    """

    url: str
    folder: str
    files: dict[str, str]
    unpacks_to: str | None = None


REMOTES = {
    cifar.CIFAR100.name: Remote(
        "https://www.cs.toronto.edu/~kriz/",
        "",
        {cifar.CIFAR100.archive: "eb9058c3a382ffc7106e4002c42a8d85"},
        unpacks_to=cifar.CIFAR100.folder,
    ),
    cifar.CIFAR10.name: Remote(
        "https://www.cs.toronto.edu/~kriz/",
        "",
        {cifar.CIFAR10.archive: "c58f30108f718f92721af3b95e74349a"},
        unpacks_to=cifar.CIFAR10.folder,
    ),
    # Not from its original site, yann.lecun.com, which refuses requests.
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
# How to obtain the data sets that cannot be downloaded.
BY_HAND = {
    miniimagenet.NAME: f"miniImageNet may not be redistributed: lay it out as {miniimagenet.LAYOUTS}",
    texts.CLINC150: "CLINC150 has no file with a published checksum: put data_full.json and domains.json in clinc150/",
    texts.FIVETEXT: "fivetext is not published: put fivetext.json in the folder",
    notmnist.NAME: f"notMNIST has no site with a published checksum: lay it out as {notmnist.LAYOUTS}",
}


def download(name: str, directory: Path) -> Report:
    """Download a data set into a folder, unless a complete one is there, and check it.

    Args:
        name: Name of the data set.
        directory: Folder of all data sets.

    Raises:
        UnknownName: There is no data set of this name.
        DataError: The download failed, or it is incomplete; the message says what to do.
    """
    if name not in READERS:
        raise UnknownName(unknown("data set", name, READERS))
    if directory.is_dir() and (report := check_one(name, directory)).state == "complete":
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
    """Return the path of a file, which is downloaded unless it exists with the right checksum."""
    pooch = import_extra("pooch")
    registry = {file: f"md5:{remote.files[file]}"}
    try:
        source = pooch.create(path=folder, base_url=remote.url, registry=registry, retry_if_failed=RETRIES)
        return Path(source.fetch(file))
    # Exceptions of requests are OSErrors; a wrong checksum is a ValueError.
    except (OSError, ValueError) as error:
        reason = "its checksum is not the published one" if type(error) is ValueError else type(error).__name__
        raise DataError(
            f"cannot download {remote.url}{file} ({reason}): try again later, or download it elsewhere, put it at "
            f"{str(folder / file)!r} and run the same command again"
        ) from error


def _unpack(archive: Path, target: Path) -> None:
    """Replace a folder by that of an archive, which is unpacked completely before."""
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        # The filter refuses links, devices and paths outside the folder.
        shutil.unpack_archive(archive, temporary, filter="data")
        if not (temporary / target.name).is_dir():
            raise DamagedData(f"{str(archive)!r} contains no folder {target.name}: download it again")
        # The old folder is incomplete, else nothing would have been downloaded.
        shutil.rmtree(target, ignore_errors=True)
        os.replace(temporary / target.name, target)
    except (tarfile.TarError, shutil.ReadError, EOFError, OSError) as error:
        raise DamagedData(f"{str(archive)!r} cannot be unpacked ({error}): delete it and download it again") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
