"""Buffers of old examples for replay, and the rules by which new examples replace old ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sgp.methods.method import Stateful

# Tensors by name, with one row for each example.
Rows = Mapping[str, Tensor]
Draws = Literal["uniform", "one-less"]


class Buffer(Stateful):
    """A limited number of examples, in tensors that grow until the buffer is full.

    Attributes:
        size: Largest number of examples.
        contents: Stored tensors by name, [n, ...].
    """

    state_names: ClassVar[tuple[str, ...]] = ("contents",)

    def __init__(self, size: int) -> None:
        self.size = size
        self.contents: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(next(iter(self.contents.values()))) if self.contents else 0

    def draw(self, count: int) -> dict[str, Tensor]:
        """Draw different examples at random: `count` of them, or all in random order if there are fewer."""
        return self.take(torch.randperm(len(self))[:count])

    def take(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the examples in some rows. rows: [m]."""
        return {name: stored[rows] for name, stored in self.contents.items()}

    def _write(self, places: Mapping[int, int], offered: Rows) -> None:
        """Write offered examples into the buffer.

        Args:
            places: Place in the buffer -> row of the offered example. New places follow the existing ones.
            offered: Offered examples.
        """
        before = len(self)
        new = [row for place, row in places.items() if place >= before]
        old = {place: row for place, row in places.items() if place < before}
        for name, rows in offered.items():
            # Always in the same memory format, since a file has no other.
            rows = rows.detach().contiguous()
            if old:
                self.contents[name][list(old)] = rows[list(old.values())]
            if new:
                stored = [self.contents[name]] if before else []
                self.contents[name] = torch.cat([*stored, rows[new]])

    def count_bytes(self) -> dict[str, int]:
        """Return the size in bytes of each stored tensor, by name."""
        return {name: stored.nbytes for name, stored in self.contents.items()}


class Reservoir(Buffer):
    """A uniform sample of everything that was ever offered (Vitter's algorithm R).

    The n-th example offered takes place j of a full buffer if j, drawn uniformly from 0..n-1, is one of its places. By
    induction each of the n examples is then in the buffer with probability size/n.

    Args:
        size: Largest number of examples.
        draws: Range that j is drawn from. "uniform": n numbers. "one-less": n - 1, the examples before this one, as in
            the published code, which therefore prefers later examples a little and always takes the first example that
            meets a full buffer.
    """

    state_names = ("contents", "seen")

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
        # 53 random bits: below every end, and uniform for any realistic number of examples.
        drawn = (torch.rand(count, dtype=torch.float64) * ends).long().tolist()
        filled, places = len(self), {}
        for row, place in enumerate(drawn):
            if filled < self.size:
                places[filled] = row
                filled += 1
            elif place < self.size:
                places[place] = row
        self._write(places, offered)


class ClassRings(Buffer):
    """The latest examples of each class of each task.

    Classes share the buffer evenly: with c classes so far each has size // c places, the first size % c of them one
    more. When a new class arrives, the other classes drop their oldest examples.

    Args:
        size: Largest number of examples.
        per_class: Largest number of examples of one class; None for the class's whole share.
    """

    state_names = ("contents", "_rings", "_free")

    def __init__(self, size: int, per_class: int | None = None) -> None:
        super().__init__(size)
        self.per_class = per_class
        # "task/class" -> its places, oldest first; classes in the order of their arrival.
        self._rings: dict[str, list[int]] = {}
        # Places that were freed and not used again yet.
        self._free: list[int] = []

    def add(self, offered: Rows, labels: Tensor, task: int) -> None:
        """Offer examples of a task, one after another. labels: [n], their classes."""
        filled, places, shares = len(self), {}, self._compute_shares()
        for row, label in enumerate(labels.tolist()):
            name = f"{task}/{label}"
            if name not in self._rings:
                self._rings[name] = []
                shares = self._compute_shares()
                self._free_places(shares)
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
        self._write(places, offered)

    def find_other_tasks(self, task: int) -> Tensor:
        """Return the places of the examples of all tasks but one, [m]."""
        rings = [ring for name, ring in self._rings.items() if name.split("/")[0] != str(task)]
        return torch.tensor([place for ring in rings for place in ring], dtype=torch.long)

    def _compute_shares(self) -> dict[str, int]:
        """Return the number of places that each class may have."""
        even, more = divmod(self.size, max(1, len(self._rings)))
        most = self.size if self.per_class is None else self.per_class
        return {name: min(most, even + (number < more)) for number, name in enumerate(self._rings)}

    def _free_places(self, shares: Mapping[str, int]) -> None:
        """Drop the oldest examples of each class that exceed its share."""
        for name, ring in self._rings.items():
            while len(ring) > shares[name]:
                self._free.append(ring.pop(0))
