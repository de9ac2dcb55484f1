"""Names for methods, networks and benchmarks: ours, and those that other packages bring."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

T = TypeVar("T")


class UnknownName(ValueError):  # noqa: N818 (it is what the user sees, and it says what is wrong)
    """A name that nothing is registered under; the message has the nearest ones."""


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
    """What to say about a name that is not there: the nearest ones, or all of them."""
    names = sorted(known)
    alike = {each.lower(): each for each in names}
    near = [alike[each] for each in get_close_matches(str(name).lower(), alike, n=3, cutoff=0.5)]
    if near:
        return f"there is no {kind} {name!r}: did you mean {' or '.join(near)}?"
    return f"there is no {kind} {name!r}; there are {', '.join(names)}"
