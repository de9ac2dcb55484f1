"""Settings: frozen dataclasses whose fields declare which values they accept."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sgp.registry import unknown

# Key of a field's metadata.
RANGE = "range"
# NumPy's generators, which draw validation images and pixel orders, accept no larger seed.
MAX_SEED = 2**32 - 1
TYPES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    NoneType: "none",
}


@dataclass(frozen=True)
class Range:
    """Interval of numbers that a setting accepts. Infinity is accepted only if `high` is infinity.

    Attributes:
        low: Smallest accepted value.
        high: Largest accepted value.
        above: Exclusive lower bound.
        below: Exclusive upper bound.
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        # Every comparison is written so that NaN fails.
        if not ((math.isfinite(value) or value == self.high) and (self.low is None or value >= self.low)):
            return False
        is_low_enough = (self.high is None or value <= self.high) and (self.below is None or value < self.below)
        return is_low_enough and (self.above is None or value > self.above)

    def describe(self, *, whole: bool) -> str:
        """Return the range in words: "at least 1", "in [0, 1)", "above 0 and finite".

        Args:
            whole: Whether the setting is a whole number, which is finite in any case.
        """
        lower, upper = self._describe_lower(), self.high if self.high is not None else self.below
        if upper is None:
            parts = [lower, "" if whole else "finite"]
            return " and ".join(part for part in parts if part)
        if upper == math.inf:
            return lower or "a number"
        if not lower:
            return f"at most {upper:g}" if self.high is not None else f"below {upper:g}"
        if whole:
            return f"from {self.low:g} to {upper:.0f}"
        left = f"[{self.low:g}" if self.low is not None else f"({self.above:g}"
        return f"in {left}, {upper:g}{']' if self.high is not None else ')'}"

    def _describe_lower(self) -> str:
        if self.low is not None:
            return f"at least {self.low:g}"
        return "" if self.above is None else f"above {self.above:g}"


def setting(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Return a dataclass field with a default and the :class:`Range` of accepted numbers.

    If the field is a dictionary, the range applies to each of its values. None is accepted if the field's type has it.

    Args:
        default: Default value.
        low: Smallest accepted value.
        high: Largest accepted value.
        above: Exclusive lower bound.
        below: Exclusive upper bound.
    """
    return field(default=default, metadata={RANGE: Range(low, high, above, below)})


@dataclass(frozen=True)
class Settings:
    """Base class of settings, which checks all fields when an object is built.

    A subclass that also checks fields against each other overrides `__post_init__` and calls this one first.
    """

    def __post_init__(self) -> None:
        """Check each field against its choices and its range."""
        validate_fields(self)


def validate_fields(settings: Any) -> None:
    """Check each field of a dataclass against the choices of its type and its range.

    Raises:
        ValueError: A value is not accepted. The message names the field, the value, and what is accepted.
    """
    hints = get_type_hints(type(settings))
    for entry in fields(settings):
        value, options = getattr(settings, entry.name), find_options(hints[entry.name])
        for each in value.values() if isinstance(value, dict) else [value]:
            _validate_value(entry.name, each, options, entry.metadata.get(RANGE))


def find_options(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union type; a type that is no union is its only member."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def convert(name: str, value: Any, wanted: Any) -> Any:
    """Convert a value of YAML, or a word of the command line, to a type: 1, "1" and "1e0" are floats too.

    Args:
        name: Name of the setting, for errors.
        value: Value to convert.
        wanted: Type, or union of types of which the first that accepts the value is chosen.

    Raises:
        ValueError: The type does not accept the value; the message names the setting.
    """
    options = find_options(wanted)
    for option in options:
        with suppress(ValueError, TypeError, KeyError):
            return _convert_to(value, option)
    if len(options) == 1 and get_origin(wanted) is Literal:
        raise ValueError(unknown(name.lstrip("-"), str(value), map(str, get_args(wanted))))
    raise ValueError(f"{name} must be {describe_type(wanted)}, got {value!r}")


def _convert_to(value: Any, kind: Any) -> Any:
    if get_origin(kind) is Literal:  # YAML reads the word "true" as a boolean
        return {str(each): each for each in get_args(kind)}[str(value).lower() if isinstance(value, bool) else value]
    if get_origin(kind) is dict:
        return {str(key): convert(str(key), item, get_args(kind)[1]) for key, item in dict(value).items()}
    if kind is NoneType:
        return {"none": None}[str(value).lower()]
    if isinstance(value, str) and kind is not bool:
        return kind(value)
    if isinstance(value, int | float if kind is float else kind) and isinstance(value, bool) == (kind is bool):
        return kind(value)
    raise ValueError


def describe_type(wanted: Any) -> str:
    """Return a type in words, for error messages."""
    if get_origin(wanted) is dict:
        return f"{describe_type(get_args(wanted)[1])} for each pattern"
    if get_origin(wanted) is Literal:
        return " or ".join(map(str, get_args(wanted)))
    return " or ".join(TYPES.get(option) or describe_type(option) for option in find_options(wanted))


def _validate_value(name: str, value: Any, options: tuple[Any, ...], accepted: Range | None) -> None:
    if value is None and NoneType in options:
        return
    choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    if choices and value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(str, choices))}, got {value!r}")
    if accepted is not None:
        check_number(name, value, accepted, whole=float not in options)


def check_number(name: str, value: Any, accepted: Range, *, whole: bool = True) -> None:
    """Raise if a number is outside a range.

    Args:
        name: Name of the number in the message.
        value: Number to check.
        accepted: Range of accepted numbers.
        whole: Whether only whole numbers are accepted.
    """
    if whole and (not isinstance(value, int) or isinstance(value, bool)):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if value not in accepted:
        raise ValueError(f"{name} must be {accepted.describe(whole=whole)}, got {value!r}")


def check_names(name: str, value: str) -> None:
    """Raise if a setting is not a list of different names with commas between them."""
    found = [part.strip() for part in value.split(",")]
    if not all(found) or len(set(found)) < len(found):
        raise ValueError(f"{name} must be different names with commas between them, got {value!r}")
