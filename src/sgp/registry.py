"""Registries of methods, networks and benchmarks by name, including those of other packages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

T = TypeVar("T")


class UnknownName(ValueError):  # noqa: N818 (users see this name)
    """Error for a name that is not registered; the message has the nearest names."""


class Registry(Generic[T]):
    """Objects by name.

    This package declares its objects with the modules that define them; other packages register theirs by entry points
    in the group ``sgp.<kind>s``. Both are imported when their names are looked up. Imported code calls :meth:`add`.

    Args:
        kind: Kind of the objects: "method", "network" or "benchmark".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._known: dict[str, T] = {}
        self._declared: dict[str, EntryPoint] = {}

    def add(self, name: str, value: T) -> None:
        """Register an object.

        Raises:
            ValueError: The name is registered for another object.
        """
        if name in self._declared or (name in self._known and self._known[name] is not value):
            raise ValueError(f"the {self.kind} {name!r} is already registered: choose another name")
        self._known[name] = value

    def declare(self, name: str, target: str) -> None:
        """Register an object that is imported when it is looked up.

        Args:
            name: Name of the object.
            target: Module and attribute, as in "sgp.methods.gpm:GPM".
        """
        self._declared[name] = EntryPoint(name, target, f"sgp.{self.kind}s")

    def __getitem__(self, name: str) -> T:
        # A config file may have a list in place of a name, which cannot be looked up.
        if not isinstance(name, str) or name not in self:
            raise UnknownName(unknown(self.kind, name, self))
        if name not in self._known:
            entry = self._entries[name]
            try:
                self._known[name] = entry.load()
            except Exception as error:
                raise ValueError(f"the {self.kind} {name!r} ({entry.value}) cannot be loaded: {error!r}") from error
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._declared, *self._known, *self._entries)))

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._entries

    @property
    def _entries(self) -> dict[str, EntryPoint]:
        """Entry points of declared objects and of other packages by name."""
        return self._external | self._declared

    @cached_property
    def _external(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=f"sgp.{self.kind}s")}


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the error message for an unknown name: it suggests the nearest names, or lists all.

    Args:
        kind: Noun for what the name stands for.
        name: Unknown name.
        known: Names that there are.
    """
    names = {each.lower(): each for each in sorted(known)}
    lower = str(name).lower()
    near = get_close_matches(lower, names, n=2, cutoff=0.6) or [each for each in names if lower in each]
    if near:
        return f"there is no {kind} {name!r}: did you mean {' or '.join(names[each] for each in near)}?"
    return f"there is no {kind} {name!r}; there are {', '.join(names.values())}"
