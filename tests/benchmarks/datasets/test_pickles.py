"""Pickles are read for their data; anything else that they name raises an error and is never run."""

import contextlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.written import dump
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sgp.benchmarks.datasets import pickles
from sgp.benchmarks.datasets.images import DamagedData

CONTENT = {
    "data": np.arange(12, dtype=np.uint8).reshape(3, 4),
    "labels": [1, 2, 3],
    "scalars": [np.int64(5), np.float32(0.5)],
    "floats": np.asfortranarray(np.arange(6, dtype=">f4").reshape(2, 3)),
    "name": "größe",
    "nested": {"rows": (1, None, True)},
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_and_plain_values_come_back_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    dump(tmp_path / "file", CONTENT, protocol)
    content = pickles.read(tmp_path / "file")
    assert content.keys() == CONTENT.keys()
    for name in ("data", "floats"):
        np.testing.assert_array_equal(content[name], CONTENT[name])
        assert content[name].flags.writeable
    assert content["data"].dtype == np.uint8
    for name in ("labels", "scalars", "name", "nested"):
        assert content[name] == CONTENT[name]


@given(
    arrays.arrays(
        st.sampled_from([np.uint8, np.int64, np.float32, np.bool_]),
        arrays.array_shapes(max_dims=4),
        elements=st.just(1),
    ),
    st.integers(0, pickle.HIGHEST_PROTOCOL),
)
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_array_of_numbers_comes_back(tmp_path: Path, array: np.ndarray[Any, Any], protocol: int) -> None:
    dump(tmp_path / "file", {"array": array}, protocol)
    back = pickles.read(tmp_path / "file")["array"]
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype


def test_files_of_python_2_are_read(tmp_path: Path) -> None:
    # {'data': 'é'} as Python 2 wrote it, with its short strings of bytes.
    (tmp_path / "file").write_bytes(b"\x80\x02}U\x04dataU\x01\xe9s.")
    assert pickles.read(tmp_path / "file") == {"data": "é"}


class PickledCall:
    """Object that is pickled as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def make_malicious(trap: Path) -> dict[str, object]:
    return {
        f"{os.system.__module__}.system": PickledCall(os.system, f"touch {trap}"),
        "builtins.eval": PickledCall(eval, f"open({str(trap)!r}, 'w')"),
        "numpy.load": PickledCall(np.load, str(trap)),
        "numpy.save": PickledCall(np.save, str(trap), [1]),
        "builtins.getattr": PickledCall(getattr, "text", "upper"),
        "pathlib": trap,
        "os.mkdir": PickledCall(os.mkdir, str(trap)),
    }


@pytest.mark.parametrize("name", make_malicious(Path("trap")))
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_file_raises_an_error_and_is_not_run(tmp_path: Path, name: str, protocol: int) -> None:
    trap = tmp_path / "trap"
    dump(tmp_path / "file", {"data": make_malicious(trap)[name]}, protocol)
    with pytest.raises(DamagedData, match="was not run") as refused:
        pickles.read(tmp_path / "file")
    assert name.partition(".")[2] in str(refused.value)
    assert not trap.exists()
    assert not trap.with_suffix(".npy").exists()


@pytest.mark.parametrize(
    "named", [b"cnumpy.ctypeslib\nload_library\n", b"cnumpy\nload\n", b"cos\nsystem\n", b"cnumpy\nndarray.tofile\n"]
)
def test_a_bare_name_raises_an_error(tmp_path: Path, named: bytes) -> None:
    (tmp_path / "file").write_bytes(named + b".")
    with pytest.raises(DamagedData, match=named[1:].split(b"\n")[1].decode()):
        pickles.read(tmp_path / "file")


@pytest.mark.parametrize("kind", ["objects", "structures", "strings"])
def test_arrays_of_anything_but_numbers_raise_an_error(tmp_path: Path, kind: str) -> None:
    array = {
        "objects": np.array([{}, 1], dtype=object),
        "structures": np.zeros(2, dtype=[("a", "i4"), ("b", "O")]),
        "strings": np.array(["a", "b"]),
    }[kind]
    dump(tmp_path / "file", {"data": array})
    with pytest.raises(DamagedData):
        pickles.read(tmp_path / "file")


def test_stand_ins_cannot_be_changed_by_a_file(tmp_path: Path) -> None:
    # Builds state onto the class that stands for numpy's scalars, then onto the one for arrays.
    for name in (b"cnumpy.core.multiarray\nscalar\n", b"cnumpy\nndarray\n", b"c_codecs\nencode\n"):
        (tmp_path / "file").write_bytes(b"\x80\x02" + name + b"N}U\x05valueK\x01s\x86b.")
        with pytest.raises(DamagedData):
            pickles.read(tmp_path / "file")
    dump(tmp_path / "file", CONTENT)
    assert pickles.read(tmp_path / "file")["scalars"] == [5, 0.5]


def test_a_value_that_is_referred_to_many_times_is_built_once(tmp_path: Path) -> None:
    # A few more floors, and a list of each would fill every memory.
    tower: Any = [CONTENT["data"]]
    for _ in range(5):
        tower = [tower, (tower, {"again": tower})]
    dump(tmp_path / "file", {"data": tower})
    floor = pickles.read(tmp_path / "file")["data"]
    for _ in range(5):
        assert floor[0] is floor[1][0] is floor[1][1]["again"]
        floor = floor[0]
    np.testing.assert_array_equal(floor[0], CONTENT["data"])


def test_a_missing_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(DamagedData, match=r"there is no file .*absent"):
        pickles.read(tmp_path / "absent")


def test_anything_but_a_dictionary_raises_an_error(tmp_path: Path) -> None:
    for content in ([1, 2], {1: 2}, "text"):
        dump(tmp_path / "file", content)
        with pytest.raises(DamagedData, match="no dictionary"):
            pickles.read(tmp_path / "file")


@given(st.integers(0, 10**6), st.integers(0, 5))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_truncated_file_is_named_in_the_error(tmp_path: Path, cut: int, protocol: int) -> None:
    whole = pickle.dumps(CONTENT, protocol=protocol)
    (tmp_path / "file").write_bytes(whole[: cut % len(whole)])
    with pytest.raises(DamagedData, match=r"file.* is truncated or damaged .*download it again"):
        pickles.read(tmp_path / "file")


@given(st.binary(max_size=60) | st.tuples(st.integers(0, 10**6), st.integers(0, 255)))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_raises_the_documented_error_or_is_data(tmp_path: Path, damage: bytes | tuple[int, int]) -> None:
    if isinstance(damage, bytes):
        content = b"\x80\x02" + damage + b"."
    else:
        whole = bytearray(pickle.dumps(CONTENT, protocol=2))
        whole[damage[0] % len(whole)] = damage[1]
        content = bytes(whole)
    (tmp_path / "file").write_bytes(content)
    with contextlib.suppress(DamagedData):
        assert isinstance(pickles.read(tmp_path / "file"), dict)
