"""The sufficient statistic of a layer's inputs, gathered in constant memory."""

from __future__ import annotations

import torch
from torch import Tensor

from sgp.projection.precision import has_float64

# Rows are multiplied in float32 unless the threshold asks for more digits than that has; sums are always
# float64.
FLOAT32_THRESHOLD = 0.9999
# Rounding grows with the number of rows summed in float32, so a product covers at most this many.
ROWS_PER_PRODUCT = 8192
# R R^T is symmetric: strips of this many of its rows are multiplied from the diagonal on, and what lies below is their
# mirror image.
STRIP = 192


class InputGram:
    """What bases and importances need to know of representation rows: R R^T, and nothing else.

    The rows themselves are kept while there are fewer of them than dimensions, because their thin SVD is then
    cheaper than an eigendecomposition; from there on only their Gram matrix is. Either way the size is
    bounded by d x d.

    A layer with a bias sees a constant 1 as one more input (``constant=True``). It is never appended to a
    batch: its row of the Gram matrix is the sum of the others.

    Args:
        groups: number of independent inputs that are handled side by side (the groups of a convolution).
        dimension: length of a row, without the constant.
        constant: whether a constant 1 is part of every row.
        precise: multiply in float64 as well as summing in it.
    """

    def __init__(self, groups: int, dimension: int, *, constant: bool = False, precise: bool = False) -> None:
        self.groups = groups
        self.inputs = dimension
        self.constant = constant
        self.precise = precise
        self.count = 0
        self._rows: list[Tensor] = []
        self._gram: Tensor | None = None

    @classmethod
    def from_gram(cls, gram: Tensor, count: int, inputs: int, *, constant: bool) -> InputGram:
        """A statistic that is known by its Gram matrix: [groups, d, d] in float64."""
        statistic = cls(gram.shape[0], inputs, constant=constant, precise=True)
        statistic._gram, statistic.count = gram, count
        return statistic

    @property
    def is_folded(self) -> bool:
        """Whether the rows are gone and only their Gram matrix is there."""
        return self._gram is not None

    @property
    def dimension(self) -> int:
        """Length of a row, the constant included."""
        return self.inputs + int(self.constant)

    @property
    def device(self) -> torch.device:
        """Device of the rows, or the CPU where that has no float64."""
        stored = self._rows[0] if self._gram is None and self._rows else self._gram
        return torch.device("cpu") if stored is None else stored.device

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        held = self._rows if self._gram is None else [self._gram]
        return sum(tensor.nbytes for tensor in held)

    def add(self, rows: Tensor) -> None:
        """Take in rows: [groups, n, inputs].

        Raises:
            FloatingPointError: the rows hold NaN or an infinity, or numbers too large to square.
        """
        rows = place_rows(rows)
        groups, n, inputs = rows.shape
        if (groups, inputs) != (self.groups, self.inputs):
            raise ValueError(f"rows of shape {tuple(rows.shape)} for {self.groups} groups of {self.inputs} inputs")
        # No entry of R R^T is larger than |R|_F^2; what is not finite fails the comparison too, and so does a norm that
        # overflows in the type that the rows are multiplied in.
        dtype = torch.float64 if self.precise or rows.dtype == torch.float64 else torch.float32
        if not float(torch.linalg.vector_norm(rows, dtype=dtype)) < torch.finfo(dtype).max ** 0.5:
            raise FloatingPointError
        if self._gram is None:
            if self.count + n < self.dimension:
                # A copy, because what comes in may be a view of an activation that is overwritten next.
                self._rows.append(rows.clone())
                self.count += n
                return
            self._fold()
        self._multiply(rows)
        self.count += n

    def get_rows(self) -> Tensor | None:
        """All rows [groups, n, d] in float64, the constant as last column; None once they are folded."""
        if self._gram is not None:
            return None
        if not self._rows:
            return torch.zeros(self.groups, 0, self.dimension, dtype=torch.float64, device=self.device)
        rows = torch.cat(self._rows, dim=1).double()
        if self.constant:
            rows = torch.cat([rows, rows.new_ones(self.groups, rows.shape[1], 1)], dim=2)
        return rows

    def get_gram(self) -> Tensor:
        """R R^T [groups, d, d] in float64; only once the rows are folded."""
        if self._gram is None:
            raise RuntimeError("the rows are still kept; ask for them instead")
        for first in range(0, self.inputs, STRIP):
            last = min(first + STRIP, self.inputs)
            self._gram[:, last:, first:last] = self._gram[:, first:last, last:].mT
        return self._gram

    def compute_energy(self) -> Tensor:
        """|R|_F^2 of each group. [groups]"""
        rows = self.get_rows()
        return self.get_gram().diagonal(dim1=1, dim2=2).sum(-1) if rows is None else rows.square().sum((1, 2))

    def compute_energy_through(self, matrix: Tensor) -> Tensor:
        """|A R|_F^2 of each group for matrices A [groups, out, d]. [groups]"""
        matrix = matrix.to(self.device).double()
        rows = self.get_rows()
        if rows is None:
            return (matrix @ self.get_gram() * matrix).sum((1, 2))
        return (rows @ matrix.mT).square().sum((1, 2))

    def clone(self) -> InputGram:
        """A copy that goes its own way from here."""
        twin = InputGram(self.groups, self.inputs, constant=self.constant, precise=self.precise)
        twin.count = self.count
        twin._rows = list(self._rows)
        twin._gram = None if self._gram is None else self._gram.clone()
        return twin

    def _fold(self) -> None:
        """Replace the rows kept so far by their Gram matrix."""
        device = self.device
        kept, self._rows = self._rows, []
        self._gram = torch.zeros(self.groups, self.dimension, self.dimension, dtype=torch.float64, device=device)
        for rows in kept:
            self._multiply(rows)

    def _multiply(self, rows: Tensor) -> None:
        assert self._gram is not None
        self._gram = self._gram.to(rows.device)
        d = self.inputs
        for chunk in torch.split(rows, ROWS_PER_PRODUCT, dim=1):
            if chunk.dtype != torch.float64:
                chunk = chunk.double() if self.precise else chunk.float()
            for first in range(0, d, STRIP):
                last = min(first + STRIP, d)
                self._gram[:, first:last, first:d] += chunk[..., first:last].mT @ chunk[..., first:]
            if self.constant:
                self._gram[:, :d, d] += chunk.sum(dim=1, dtype=torch.float64)
                self._gram[:, d, d] += chunk.shape[1]


def place_rows(rows: Tensor) -> Tensor:
    """Return rows without history, on the CPU if their device has no float64 to sum them in."""
    rows = rows.detach()
    return rows if has_float64(rows.device) else rows.cpu()
