"""Report of an update as data and as a table, and its progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import length_hint
from typing import Any, Self

from sgp.projection.capacity import format_bytes, group_names
from sgp.projection.gram import InputGram, Kind
from sgp.projection.subspace import Bases

# A progress bar is shown once an update has taken so many seconds.
PROGRESS_DELAY = 3.0
# Its width in characters.
BAR = 30


@dataclass(frozen=True)
class LayerUpdate:
    """Result of an update for one Gram matrix.

    Attributes:
        bases: Number of bases after the update.
        added: Number of bases that the update added.
        dimension: Largest possible number of bases.
        captured: Share of the energy of the inputs that the bases capture, [0, 1]; None if they saw no input.
        leading: Largest share of the energy that one basis captures, [0, 1]; 0 for embeddings.
        is_bound: Whether the captured share is a lower bound, as the certificate of a sketch is.
        path: How the inputs were collected.
        rows: Number of rows.
        bytes: Bytes of the Gram matrix, or of what was kept instead, at the end of the pass.
        passes: Number of passes over the data; two where the first one did not certify the threshold.
        layers: Names of the layers that share the Gram matrix.
    """

    bases: int
    added: int
    dimension: int
    captured: float | None
    leading: float
    is_bound: bool
    path: Kind
    rows: int
    bytes: int
    passes: int = 1
    layers: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class UpdateReport:
    """Result of an update. Print it, or evaluate it in a notebook.

    Attributes:
        layers: Result for each Gram matrix.
        seconds: Time of all passes and decompositions.
    """

    layers: list[LayerUpdate]
    seconds: float

    @property
    def bytes(self) -> int:
        """Bytes of all Gram matrices together."""
        return sum(layer.bytes for layer in self.layers)

    def __str__(self) -> str:
        lines = [
            f"{self.seconds:.1f} s, {format_bytes(self.bytes)}",
            f"{'bases':>7} {'of':>6} {'added':>6} {'captured':>11} {'path':>8} {'passes':>6}  layers",
        ]
        for layer in self.layers:
            captured = "" if layer.captured is None else f"{'>= ' if layer.is_bound else ''}{layer.captured:.2%}"
            lines.append(
                f"{layer.bases:>7} {layer.dimension:>6} {layer.added:>6} {captured:>11} {layer.path:>8} "
                f"{layer.passes:>6}  {group_names(layer.layers)}"
            )
        return "\n".join(lines)

    __repr__ = __str__


def describe_update(layers: list[str], before: Bases, after: Bases, gram: InputGram) -> LayerUpdate:
    """Return the result of an update for one Gram matrix, which some layers share."""
    bases = int(after.rank.sum())
    return LayerUpdate(
        bases=bases,
        added=bases - int(before.rank.sum()),
        dimension=after.groups * after.dimension,
        captured=gram.captured,
        leading=gram.leading,
        is_bound=gram.kind == "sketch",
        path=gram.kind,
        rows=gram.count,
        bytes=gram.nbytes,
        layers=layers,
    )


class UpdateProgress:
    """Progress of an update in a terminal, shown only if the update takes longer than a few seconds.

    Args:
        passes: Number of passes over the data that are planned.
        batches: Batches of one pass.
        is_shown: Whether this process shows it.
    """

    def __init__(self, passes: int, batches: Iterable[Any], *, is_shown: bool) -> None:
        self._passes = passes
        self._length = length_hint(batches)  # 0 if it is not known
        self._is_shown = is_shown and sys.stderr.isatty()
        self._start = time.monotonic()
        self._done = 0
        self._width = 0  # of the line that is shown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._width:
            self._write("")

    def add_pass(self) -> None:
        """Plan one more pass."""
        self._passes += 1

    def advance(self, grams: object = None) -> bool:
        """Count one batch, and return that the pass goes on."""
        self._done += 1
        if self._is_shown and time.monotonic() - self._start >= PROGRESS_DELAY:
            self._write(self.describe())
        return False

    def describe(self) -> str:
        """Return the line that is shown."""
        if not self._length:
            return f"memory.update: {self._done} batches"
        # With samples= a pass may end before the batches do.
        share = min(1.0, self._done / (self._passes * self._length))
        return f"memory.update: {'#' * round(BAR * share):.<{BAR}} {share:.0%}"

    def _write(self, line: str) -> None:
        sys.stderr.write("\r" + line.ljust(self._width) + ("" if line else "\r"))
        sys.stderr.flush()
        self._width = max(self._width, len(line))
