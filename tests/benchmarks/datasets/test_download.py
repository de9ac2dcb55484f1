"""`sgp data get`, against a server on this machine."""

import gc
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from benchmarks.written import SMALL_CIFAR, SMALL_MNIST, write_cifar, write_mnist

from sgp.benchmarks.datasets import check, cifar, download, idx
from sgp.benchmarks.datasets.images import DamagedData, DataError
from sgp.registry import UnknownName

pytest.importorskip("pooch", reason="of the extra 'benchmarks'")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Serve a folder, and return it with its address."""
    folder = tmp_path / "served"
    folder.mkdir()
    with HTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


# After an error pooch leaves its connection to the collector of garbage.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "RETRIES", 0)
    monkeypatch.setitem(check.READERS, "cifar100", lambda directory: cifar.read(directory, SMALL_CIFAR))
    monkeypatch.setitem(check.READERS, "mnist", lambda directory: idx.read(directory, SMALL_MNIST))


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def remote_archive(served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, archive: Path) -> None:
    remote = download.Remote(served[1], "", {archive.name: md5(archive)}, unpacks_to="cifar-100-python")
    monkeypatch.setitem(download.REMOTES, "cifar100", remote)


@pytest.fixture
def archive(served: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Serve a small CIFAR-100 as published."""
    write_cifar(tmp_path / "written", SMALL_CIFAR)
    path = served[0] / "cifar-100-python.tar.gz"
    with tarfile.open(path, "w:gz") as file:
        file.add(tmp_path / "written" / "cifar-100-python", "cifar-100-python")
    remote_archive(served, monkeypatch, path)
    return path


def test_an_archive_is_downloaded_unpacked_and_checked(archive: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert download.download("cifar100", data).state == "complete"
    assert cifar.read(data, SMALL_CIFAR).train.shape == (12, 3, 32, 32)
    assert {path.name for path in data.iterdir()} == {"cifar-100-python", "cifar-100-python.tar.gz"}


def test_files_are_downloaded_and_checked(
    served: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(served[0], SMALL_MNIST, packed=True)
    files = {path.name: md5(path) for path in served[0].iterdir()}
    monkeypatch.setitem(download.REMOTES, "mnist", download.Remote(served[1], "MNIST/raw", files))
    assert download.download("mnist", tmp_path / "data").state == "complete"
    assert {path.name for path in (tmp_path / "data" / "MNIST" / "raw").iterdir()} == set(files)


def test_a_complete_data_set_is_not_downloaded_again(archive: Path, tmp_path: Path) -> None:
    write_cifar(tmp_path / "data", SMALL_CIFAR)
    archive.unlink()
    assert download.download("cifar100", tmp_path / "data").state == "complete"


def test_a_damaged_data_set_is_replaced(archive: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    download.download("cifar100", data)
    (data / "cifar-100-python" / "train").write_bytes(b"damaged")
    (data / "cifar-100-python.tar.gz").write_bytes(b"damaged too")
    assert download.download("cifar100", data).state == "complete"
    assert {path.name for path in data.iterdir()} == {"cifar-100-python", "cifar-100-python.tar.gz"}


def test_a_file_put_there_by_hand_is_used(archive: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    archive.rename(data / archive.name)
    assert download.download("cifar100", data).state == "complete"


def test_a_file_that_is_not_found_is_reported_in_a_sentence(archive: Path, tmp_path: Path) -> None:
    archive.unlink()
    with pytest.raises(
        DataError, match=r"^cannot download http://127.*tar.gz \(HTTPError\): .*put it at .*data/cifar"
    ) as e:
        download.download("cifar100", tmp_path / "data")
    assert "\n" not in str(e.value)


def test_a_missing_network_is_reported_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = download.Remote("http://127.0.0.1:9/", "", {"cifar-100-python.tar.gz": "0" * 32})
    monkeypatch.setitem(download.REMOTES, "cifar100", remote)
    with pytest.raises(DataError, match=r"^cannot download http://127.0.0.1:9/.* \(ConnectionError\)"):
        download.download("cifar100", tmp_path / "data")


def test_a_file_with_another_checksum_raises_an_error(archive: Path, tmp_path: Path) -> None:
    archive.write_bytes(archive.read_bytes() + b"more")
    with pytest.raises(DataError, match="checksum is not the published one"):
        download.download("cifar100", tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


def test_an_archive_with_paths_outside_its_folder_raises_an_error(
    served: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = served[0] / "cifar-100-python.tar.gz"
    with tarfile.open(path, "w:gz") as file:
        member = tarfile.TarInfo("../../escaped")
        member.size = 4
        file.addfile(member, io.BytesIO(b"oops"))
    remote_archive(served, monkeypatch, path)
    with pytest.raises(DamagedData, match="cannot be unpacked"):
        download.download("cifar100", tmp_path / "data")
    assert not list(tmp_path.rglob("escaped"))
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"cifar-100-python.tar.gz"}


def test_a_truncated_archive_or_one_of_something_else_raises_an_error(
    served: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archive: Path
) -> None:
    archive.write_bytes(archive.read_bytes()[:-1000])
    remote_archive(served, monkeypatch, archive)
    with pytest.raises(DamagedData, match="cannot be unpacked"):
        download.download("cifar100", tmp_path / "data")
    with tarfile.open(archive, "w:gz") as file:
        file.addfile(tarfile.TarInfo("other"))
    remote_archive(served, monkeypatch, archive)
    with pytest.raises(DamagedData, match="contains no folder cifar-100-python"):
        download.download("cifar100", tmp_path / "data")
    assert {path.name for path in (tmp_path / "data").iterdir()} == {archive.name}


@pytest.mark.parametrize(("name", "words"), [("miniimagenet", r"WNID/\*.jpg"), ("notmnist", "notMNIST_small")])
def test_data_that_may_not_be_downloaded_is_reported_with_its_layouts(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        download.download(name, tmp_path)


def test_an_unknown_name_is_reported_with_the_nearest_names(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="cifar100"):
        download.download("cifar-100", tmp_path)


def test_every_data_set_has_a_download_or_instructions() -> None:
    assert {*download.REMOTES, *download.BY_HAND, "english"} == set(check.READERS)
    for remote in download.REMOTES.values():
        assert all(len(digest) == 32 for digest in remote.files.values())
