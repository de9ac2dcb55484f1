"""Reader of pickles of arrays and plain values that never runs anything that a pickle names.

Published data sets are pickles, and a pickle is a program: it may call whatever it names. Here the few names that
arrays need are replaced by small classes, which only collect the arguments; the arrays are created afterwards, of
plain numbers only. Even numpy's own constructors are not called by the file, since they trust their arguments.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from sgp.benchmarks.datasets.images import DamagedData

# Kinds of numbers that arrays may have: bool, unsigned, signed and floating point.
KINDS = "buif"


class _StandIn:
    """Stand-in for something that a pickle may name; unless a subclass allows it, a pickle cannot set its state."""

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError(f"{type(self).__name__} takes no state")


class _Type(_StandIn):
    """Stand-in for numpy.dtype."""

    def __init__(self, code: Any = "", *_: Any) -> None:
        self.code = str(code)
        self.order: Any = "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]

    def read_numbers(self, content: Any) -> NDArray[Any]:
        """Interpret bytes as numbers of this type; the array cannot be written to."""
        dtype = np.dtype(self.code)
        if dtype.kind not in KINDS:
            raise pickle.UnpicklingError(f"an array of {self.code!r} is not an array of numbers")
        if isinstance(content, str):
            content = content.encode("latin1")
        if not isinstance(content, bytes | bytearray):
            raise pickle.UnpicklingError(f"the content of an array is a {type(content).__name__}")
        # The byte order "|" is for types that have none.
        return np.frombuffer(content, dtype if self.order == "|" else dtype.newbyteorder(self.order))


class _Array(_StandIn):
    """Stand-in for an array, with the state that the pickle gives it."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def build(self) -> NDArray[Any]:
        _, shape, type_, fortran, content = self.state
        return type_.read_numbers(content).reshape(shape, order="F" if fortran else "C").copy()  # type: ignore[no-any-return]


class _BufferArray(_StandIn):
    """Stand-in for an array in pickles of protocol 5."""

    def __init__(self, content: Any, type_: Any, shape: Any, order: Any) -> None:
        self.arguments = content, type_, shape, order

    def build(self) -> NDArray[Any]:
        content, type_, shape, order = self.arguments
        return type_.read_numbers(content).reshape(shape, order=order).copy()  # type: ignore[no-any-return]


class _Scalar(_StandIn):
    """Stand-in for a single number of numpy."""

    def __init__(self, type_: Any, content: Any) -> None:
        self.arguments = type_, content

    def build(self) -> Any:
        type_, content = self.arguments
        return type_.read_numbers(content)[0].item()


class _Bytes(_StandIn):
    """Stand-in for _codecs.encode, by which Python 3 writes bytes for Python 2."""

    def __new__(cls, text: str, encoding: str) -> Any:
        if encoding != "latin1":
            raise pickle.UnpicklingError(f"bytes in {encoding!r}")
        return text.encode("latin1")


# numpy has renamed its modules, and pickles have old and new names.
_ALLOWED: dict[tuple[str, str], type[_StandIn]] = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _Scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _BufferArray for core in ("core", "_core")},
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _Bytes,
}


class _Refused(Exception):  # noqa: N818
    """The pickle names something that is not data."""


class _Unpickler(pickle.Unpickler):
    """Unpickler of arrays, numbers, strings and their containers, which refuses all other names."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None


def read(path: Path) -> dict[str, Any]:
    """Read the dictionary in a pickle; strings of Python 2 and bytes become text in latin-1.

    Raises:
        DamagedData: The file is missing, truncated, damaged or not a dictionary, or it names something other than
            arrays and plain values.
    """
    try:
        with path.open("rb") as file:
            content = _build(_Unpickler(file, encoding="latin1").load(), {})
    except FileNotFoundError:
        raise DamagedData(f"there is no file {str(path)!r}: download it again") from None
    except _Refused as refused:
        raise DamagedData(
            f"{str(path)!r} names {refused}, which does not belong in a data file and was not run: "
            "do not trust its origin, and download it again"
        ) from None
    # A damaged pickle can raise any exception.
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise DamagedData(f"{str(path)!r} is truncated or damaged ({reason}): download it again") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise DamagedData(f"{str(path)!r} has no dictionary of data: is it the right file?")
    return content


def is_bytes_array(value: Any, *shape: int) -> TypeGuard[NDArray[np.uint8]]:
    """Return whether a value is an array of bytes, [n, *shape]."""
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim > 0 and value.shape[1:] == shape


def _build(value: Any, known: dict[int, Any]) -> Any:
    """Replace stand-ins by arrays and numbers, and bytes by text.

    Args:
        value: Content of the pickle.
        known: Results by the identity of the value. A few bytes can refer to one value billions of times: it is built
            only once.
    """
    if id(value) not in known:
        known[id(value)] = _build_new(value, known)
    return known[id(value)]


def _build_new(value: Any, known: dict[int, Any]) -> Any:
    match value:
        case _Array() | _BufferArray() | _Scalar():
            return value.build()
        case dict():
            return {_build(key, known): _build(item, known) for key, item in value.items()}
        case list() | tuple():
            return type(value)(_build(item, known) for item in value)
        case bytes():
            # Copies of the published files differ in their kind of strings.
            return value.decode("latin1")
        case _StandIn() | type():
            raise pickle.UnpicklingError(f"a stray {value!r}")
    return value
