"""Registries of methods, networks and benchmarks: ours, and those of other packages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

T = TypeVar("T")


class UnknownName(ValueError):  # noqa: N818 (users see this name, and it says what is wrong)
    """Nothing is registered under a name; the message has the nearest names."""


class Registry(Generic[T]):
    """Things by name.

    Ours are declared with the module that defines them; other packages add theirs by an entry point in the group
    `sgp.<kind>s`. Both are imported when their name is asked for. A script that was imported adds its own by
    :meth:`add`.

    Args:
        kind: Noun for one of the things: "method", "network", "benchmark".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._known: dict[str, T] = {}
        self._declared: dict[str, EntryPoint] = {}

    def add(self, name: str, thing: T) -> None:
        """Register a thing. A name that is taken is refused, since a run's config must mean one thing."""
        if name in self._declared or (name in self._known and self._known[name] is not thing):
            raise ValueError(f"the {self.kind} {name!r} is already registered")
        self._known[name] = thing

    def declare(self, name: str, target: str) -> None:
        """Register a thing that is imported when it is asked for.

        Args:
            name: Name of the thing.
            target: Module and attribute, as in "sgp.methods.gpm:GPM".
        """
        self._declared[name] = EntryPoint(name, target, f"sgp.{self.kind}s")

    def __getitem__(self, name: str) -> T:
        if not isinstance(name, str) or name not in self:  # a file may have a list in its place, which is unhashable
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
        """What is imported when it is asked for, by name."""
        return self._others | self._declared

    @cached_property
    def _others(self) -> dict[str, EntryPoint]:
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
