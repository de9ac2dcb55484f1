"""Pickles of arrays and plain values, read without running anything that a pickle can name.

Published data sets are pickles, and a pickle is a program: it may call whatever it names. Here the few names that
arrays need stand for small classes of our own, which only collect what the pickle says; the arrays are made afterwards,
of plain numbers only. Not even numpy's own constructors are called by the file, since these trust what they are given.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgp.benchmarks.datasets.images import DamagedData

NUMBERS = "buif"


class _Part:
    """Something that a pickle may name. It takes no state, also not as a class, unless it says so itself."""

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError(f"{type(self).__name__} takes no state")


class _Type(_Part):
    """Stands for numpy.dtype."""

    def __init__(self, code: Any = "", *_: Any) -> None:
        self.code = str(code)
        self.order: Any = "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]

    def dtype(self) -> np.dtype[Any]:
        dtype = np.dtype(self.code)
        if dtype.kind not in NUMBERS:
            raise pickle.UnpicklingError(f"an array of {self.code!r} is not one of numbers")
        # "|" is the order of types that have none.
        return dtype if self.order == "|" else dtype.newbyteorder(self.order)


class _Array(_Part):
    """Stands for an array: what numpy's constructor and then its state are given."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def value(self) -> NDArray[Any]:
        _, shape, type_, fortran, content = self.state
        flat = np.frombuffer(_raw(content), type_.dtype())
        # Copied, since the bytes cannot be written to and torch asks for that.
        return flat.reshape(shape, order="F" if fortran else "C").copy()


class _BufferArray(_Part):
    """Stands for an array as newer pickles (protocol 5) have it."""

    def __init__(self, content: Any, type_: Any, shape: Any, order: Any) -> None:
        self.arguments = content, type_, shape, order

    def value(self) -> NDArray[Any]:
        content, type_, shape, order = self.arguments
        return np.frombuffer(_raw(content), type_.dtype()).reshape(shape, order=order).copy()


class _Scalar(_Part):
    """Stands for a single number of numpy."""

    def __init__(self, type_: Any, content: Any) -> None:
        self.arguments = type_, content

    def value(self) -> Any:
        type_, content = self.arguments
        return np.frombuffer(_raw(content), type_.dtype())[0].item()


class _Bytes(_Part):
    """Stands for _codecs.encode, by which Python 3 writes bytes for Python 2."""

    def __new__(cls, text: str, encoding: str) -> Any:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"bytes in {encoding!r}")
        return text.encode("latin1")


# numpy has renamed its modules; old and new pickles are both about.
_ADMITTED: dict[tuple[str, str], type[_Part]] = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _Scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _BufferArray for core in ("core", "_core")},
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _Bytes,
}


class _Refused(Exception):  # noqa: N818
    """The pickle names something that has no place in data."""


class _Unpickler(pickle.Unpickler):
    """Reads arrays, numbers, strings and their containers; refuses everything else by name."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None


def read(path: Path) -> dict[str, Any]:
    """The dictionary in a pickle; strings of Python 2 and bytes are read as latin-1 text.

    Raises:
        DamagedData: it is not there, truncated, damaged or no dictionary, or it names something other than arrays and
            plain values.
    """
    try:
        with path.open("rb") as file:
            content = _made(_Unpickler(file, encoding="latin1").load(), {})
    except FileNotFoundError:
        raise DamagedData(f"there is no file {str(path)!r}: get it again") from None
    except _Refused as refused:
        raise DamagedData(
            f"{str(path)!r} names {refused}, which has no place in a file of data and was not run: "
            "do not trust where it came from, and get it again"
        ) from None
    # Garbage can fail in any way that the machine behind pickle can.
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise DamagedData(f"{str(path)!r} is truncated or damaged ({reason}): get it again") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise DamagedData(f"{str(path)!r} holds no dictionary of data: is it the right file?")
    return content


def _made(value: Any, known: dict[int, Any]) -> Any:
    """The same with arrays in place of what stands for them, and text in place of bytes.

    known: what was made already, by the identity of what it was made of. A few bytes can name one thing billions of
    times: it stays one thing.
    """
    if id(value) not in known:
        known[id(value)] = _make(value, known)
    return known[id(value)]


def _make(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, _Array | _BufferArray | _Scalar):
        return value.value()
    if isinstance(value, dict):
        return {_made(key, known): _made(item, known) for key, item in value.items()}
    if isinstance(value, list):
        return [_made(item, known) for item in value]
    if isinstance(value, tuple):
        return tuple(_made(item, known) for item in value)
    if isinstance(value, bytes):
        # Copies of the published files differ in which kind of string they have.
        return value.decode("latin1")
    if isinstance(value, _Part | type):
        raise pickle.UnpicklingError(f"a stray {value!r}")
    return value


def _raw(content: Any) -> bytes | bytearray:
    if isinstance(content, str):
        return content.encode("latin1")
    if isinstance(content, bytes | bytearray):
        return content
    raise pickle.UnpicklingError(f"the content of an array is a {type(content).__name__}")
