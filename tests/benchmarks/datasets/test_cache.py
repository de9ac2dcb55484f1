"""Decoded images are cached, mapped into memory, and decoded again if the cache is damaged."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks.written import SMALL_MINI, are_equal, image_set, write_class_folders

from sgp.benchmarks.datasets import miniimagenet
from sgp.benchmarks.datasets.cache import ABANDONED, Source, load_cached
from sgp.benchmarks.datasets.images import ImageSet

IMAGES = image_set(classes=4, train_each=5, test_each=2)


class CountingSource:
    """Source that counts how often it is decoded."""

    def __init__(self, root: Path) -> None:
        self.decoded = 0
        self.file = root / "source"
        self.file.write_text("one")

    def read(self) -> ImageSet:
        return load_cached("small", Source(self.file.parent, [self.file], self._decode))

    def _decode(self) -> ImageSet:
        self.decoded += 1
        return IMAGES


@pytest.fixture
def source(tmp_path: Path) -> CountingSource:
    return CountingSource(tmp_path)


def test_images_are_decoded_once(source: CountingSource, cache: Path) -> None:
    assert are_equal(source.read(), IMAGES)
    assert are_equal(source.read(), IMAGES)
    assert source.decoded == 1
    (file,) = cache.iterdir()
    assert file.name.startswith("small-")


def test_changed_sources_are_decoded_again(source: CountingSource) -> None:
    source.read()
    source.file.write_text("other")
    source.read()
    assert source.decoded == 2
    status = source.file.stat()
    os.utime(source.file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    source.read()
    assert source.decoded == 3
    renamed = source.file.rename(source.file.with_name("renamed"))
    source.file = renamed
    source.read()
    assert source.decoded == 4


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999])
def test_a_truncated_file_is_decoded_again(source: CountingSource, cache: Path, share: float) -> None:
    source.read()
    (file,) = cache.iterdir()
    os.truncate(file, int(share * file.stat().st_size))
    assert are_equal(source.read(), IMAGES)
    assert source.decoded == 2
    assert are_equal(source.read(), IMAGES)
    assert source.decoded == 2


def test_a_file_of_something_else_is_decoded_again(source: CountingSource, cache: Path) -> None:
    from safetensors.torch import save_file

    source.read()
    (file,) = cache.iterdir()
    for tensors, header in (
        ({"train": torch.zeros(1)}, {"classes": "[]"}),
        ({"train": torch.zeros(1)}, None),
        ({n: torch.zeros(2, dtype=torch.uint8) for n in ("train", "train_labels", "test")}, {"classes": "[]"}),
    ):
        save_file(tensors, file, metadata=header)
        assert are_equal(source.read(), IMAGES)


def test_files_of_killed_writers_are_not_read_and_are_removed_when_old(source: CountingSource, cache: Path) -> None:
    cache.mkdir()
    old, new = cache / ".small-a.safetensors.1.partial", cache / ".small-a.safetensors.2.partial"
    for left in (old, new):
        left.write_bytes(b"half of it")
    os.utime(old, (time.time() - 2 * ABANDONED,) * 2)
    assert are_equal(source.read(), IMAGES)
    assert not old.exists()
    assert new.exists()


def test_without_a_writable_cache_images_are_decoded_each_time_with_a_warning(
    source: CountingSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SGP_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"cannot be cached in .*SGP_CACHE"):
            assert are_equal(source.read(), IMAGES)
    assert source.decoded == 2


@pytest.mark.slow
def test_only_the_images_that_are_used_are_read_into_memory(tmp_path: Path) -> None:
    if not Path("/proc/self/status").is_file():
        pytest.skip("memory is read from /proc, which Linux has")
    script = f"""
import torch
from pathlib import Path
from sgp.benchmarks.datasets.cache import Source, load_cached
from sgp.benchmarks.datasets.images import ImageSet
def kilobytes():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])
def decode():
    assert not {{had}}
    labels = torch.zeros(2000, dtype=torch.int64)
    return ImageSet(torch.full((2000, 3, 128, 128), 7, dtype=torch.uint8), labels, torch.zeros(1, 3, 2, 2).byte(),
                    labels[:1].clone(), ["one"])
root = Path({str(tmp_path)!r})
load_cached("warm", Source(root, [], lambda: ImageSet(*(torch.zeros(1).byte() for _ in range(4)), ["one"])))
before = kilobytes()
images = load_cached("large", Source(root, [], decode))
if {{had}}:
    assert kilobytes() - before < 20_000, kilobytes() - before
    assert int(images.train[1500:1510].sum()) == 7 * 10 * 3 * 128 * 128
    assert kilobytes() - before < 30_000, kilobytes() - before
"""
    for had in ("False", "True"):
        subprocess.run([sys.executable, "-c", script.replace("{had}", had)], check=True)


@pytest.mark.slow
def test_a_decoder_killed_at_any_moment_leaves_no_damaged_cache(tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("PIL", reason="of the extra 'benchmarks'")
    write_class_folders(tmp_path / "data", each=7)
    expected = miniimagenet.decode(tmp_path / "data", SMALL_MINI)
    # Reports its start and writes the file repeatedly, so that the kill may interrupt any part of the writing.
    script = f"""
from pathlib import Path
from benchmarks.written import SMALL_MINI
from sgp.benchmarks.datasets import cache, miniimagenet
print("ready", flush=True)
while True:
    miniimagenet.read(Path({str(tmp_path / "data")!r}), SMALL_MINI)
    for file in cache.get_cache_folder().glob("*.safetensors"):
        file.unlink()
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    moments = random.Random(0)
    for _ in range(4):
        decoder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
        assert decoder.stdout is not None
        with decoder.stdout:
            assert decoder.stdout.readline() == b"ready\n"
        time.sleep(moments.uniform(0, 0.3))
        decoder.send_signal(signal.SIGKILL)
        decoder.wait()
        assert are_equal(miniimagenet.read(tmp_path / "data", SMALL_MINI), expected)
