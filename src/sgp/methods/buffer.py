"""Examples of old tasks that are kept to be learned again, and which of them give way to new ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

# Tensors by name, with one row an example.
Rows = Mapping[str, Tensor]
Draws = Literal["uniform", "one-less"]


class Buffer:
    """At most so many examples, as tensors that grow until they are full.

    Attributes:
        size: the most examples.
        contents: what is kept of each, by name, [n, ...].
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.contents: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(next(iter(self.contents.values()))) if self.contents else 0

    def draw(self, count: int) -> dict[str, Tensor]:
        """So many different examples at random, or all of them in random order if there are not more."""
        rows = torch.randperm(len(self))[:count]
        return self.take(rows)

    def take(self, rows: Tensor) -> dict[str, Tensor]:
        """Some of the examples. rows: [m]."""
        return {name: kept[rows] for name, kept in self.contents.items()}

    def _put(self, places: Mapping[int, int], offered: Rows) -> None:
        """Write examples: place in the buffer -> row of what is offered. New places follow those that there are."""
        before = len(self)
        new = [row for place, row in places.items() if place >= before]
        old = {place: row for place, row in places.items() if place < before}
        for name, rows in offered.items():
            # Always in the same memory format, since a file knows no other.
            rows = rows.detach().contiguous()
            if old:
                self.contents[name][list(old)] = rows[list(old.values())]
            if new:
                kept = [self.contents[name]] if before else []
                self.contents[name] = torch.cat([*kept, rows[new]])

    def bytes(self) -> dict[str, int]:
        """Memory of what is kept, by name."""
        return {name: kept.nbytes for name, kept in self.contents.items()}

    def state_dict(self) -> dict[str, Any]:
        """What is kept."""
        return {"contents": dict(self.contents)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        # A copy, since examples are overwritten in place.
        self.contents = {name: kept.clone() for name, kept in state["contents"].items()}


class Reservoir(Buffer):
    """A uniform sample of everything that was ever offered (Vitter's algorithm R).

    The n-th example offered takes place j of a full buffer if j, drawn uniformly from 0..n-1, is one of its places. By
    induction each of the n is then in the buffer with probability size/n.

    Args:
        size: the most examples.
        draws: from how many numbers j is drawn: "uniform" is n; "one-less" is n - 1, the examples before this one, as
            in the published code, which thereby prefers later examples a little and always takes the first that meets
            a full buffer.
    """

    def __init__(self, size: int, draws: Draws = "uniform") -> None:
        super().__init__(size)
        self.draws = draws
        self.seen = 0

    def add(self, offered: Rows) -> None:
        """Offer examples, one after another."""
        count = len(next(iter(offered.values())))
        numbers = torch.arange(self.seen + 1, self.seen + count + 1, dtype=torch.float64)
        self.seen += count
        ends = numbers if self.draws == "uniform" else numbers - 1
        # 53 random bits: below every end, and uniform over it as far as any number of examples can tell.
        drawn = (torch.rand(count, dtype=torch.float64) * ends).long().tolist()
        filled, places = len(self), {}
        for row, place in enumerate(drawn):
            if filled < self.size:
                places[filled] = row
                filled += 1
            elif place < self.size:
                places[place] = row
        self._put(places, offered)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.seen = state["seen"]


class ClassRings(Buffer):
    """The latest examples of each class of each task.

    Classes share the buffer evenly: with c classes so far each has size // c places, the first size % c of them one
    more. When a class comes the others give up their oldest examples.

    Args:
        size: the most examples.
        per_class: the most examples of one class; none: as many as its share.
    """

    def __init__(self, size: int, per_class: int | None = None) -> None:
        super().__init__(size)
        self.per_class = per_class
        # "task/class" -> its places, oldest first, in the order in which classes came.
        self._rings: dict[str, list[int]] = {}
        # Places that were given up and not taken yet.
        self._free: list[int] = []

    def add(self, offered: Rows, labels: Tensor, task: int) -> None:
        """Offer examples of a task, one after another. labels: [n], their classes."""
        filled, places, shares = len(self), {}, self._shares()
        for row, label in enumerate(labels.tolist()):
            name = f"{task}/{label}"
            if name not in self._rings:
                self._rings[name] = []
                shares = self._shares()
                self._give_up(shares)
            ring = self._rings[name]
            if shares[name] == 0:  # more classes than places
                continue
            if len(ring) == shares[name]:
                ring.append(ring.pop(0))
            elif self._free:
                ring.append(self._free.pop())
            else:
                ring.append(filled)
                filled += 1
            places[ring[-1]] = row
        self._put(places, offered)

    def others(self, task: int) -> Tensor:
        """The places of what is kept of all tasks but one, [m]."""
        rings = [ring for name, ring in self._rings.items() if name.split("/")[0] != str(task)]
        return torch.tensor([place for ring in rings for place in ring], dtype=torch.long)

    def _shares(self) -> dict[str, int]:
        """How many places each class may have."""
        even, more = divmod(self.size, max(1, len(self._rings)))
        most = self.size if self.per_class is None else self.per_class
        return {name: min(most, even + (number < more)) for number, name in enumerate(self._rings)}

    def _give_up(self, shares: Mapping[str, int]) -> None:
        """Take from each class the oldest that exceed its share."""
        for name, ring in self._rings.items():
            while len(ring) > shares[name]:
                self._free.append(ring.pop(0))

    def state_dict(self) -> dict[str, Any]:
        rings = {name: list(ring) for name, ring in self._rings.items()}
        return super().state_dict() | {"rings": rings, "free": list(self._free)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._rings = {name: list(ring) for name, ring in state["rings"].items()}
        self._free = list(state["free"])
