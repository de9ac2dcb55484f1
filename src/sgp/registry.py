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

    Other packages add theirs by an entry point in the group `sgp.<kind>s`, which is loaded when its name is asked for;
    a script that was imported adds its own by :meth:`add`.

    Args:
        kind: what one of them is called: "method", "network", "benchmark".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._known: dict[str, T] = {}

    def add(self, name: str, thing: T) -> None:
        """Register a thing. A name that is taken is refused, since a run's config must mean one thing."""
        if name in self._known and self._known[name] is not thing:
            raise ValueError(f"the {self.kind} {name!r} is there already")
        self._known[name] = thing

    def __getitem__(self, name: str) -> T:
        if not isinstance(name, str):  # a file may have a list in its place, which cannot be looked up
            raise UnknownName(unknown(self.kind, name, self))
        if name not in self._known:
            if name not in self._others:
                raise UnknownName(unknown(self.kind, name, self))
            entry = self._others[name]
            try:
                self._known[name] = entry.load()
            except Exception as error:
                raise ValueError(f"the {self.kind} {name!r} ({entry.value}) cannot be loaded: {error!r}") from error
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._known
        yield from (name for name in self._others if name not in self._known)

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._others

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
