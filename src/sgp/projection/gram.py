"""The Gram matrix of a layer's inputs, collected in constant memory, and its decomposition."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from sgp.projection.precision import has_float64

Kind = Literal["float64", "float32", "sketch"]

# Rows are multiplied in float32 unless the threshold asks for more digits than float32 has; sums are always float64.
FLOAT32_THRESHOLD = 0.9999
# Rounding grows with the number of rows summed in float32, so a product covers at most this many.
ROWS_PER_PRODUCT = 8192
# R R^T is symmetric: only strips of this many of its rows are multiplied, from the diagonal on. The part below the
# diagonal is mirrored.
STRIP = 192


@dataclass(frozen=True)
class GramPath:
    """How the inputs of a layer are collected.

    Attributes:
        kind: ``"float64"`` sums in float64 and decomposes whole spectra, ``"float32"`` keeps a Gram matrix in float32,
            ``"sketch"`` a low-rank sketch where few directions suffice, and otherwise the same as ``"float32"``.
        threshold: Share of the energy that bases must capture.
        omega: Test directions of a sketch, where several processes must have the same ones. [d, l]
    """

    kind: Kind = "float64"
    threshold: float = 1.0
    omega: Tensor | None = field(default=None, compare=False)

    @property
    def is_precise(self) -> bool:
        """Whether products are computed in float64, as sums are."""
        return self.threshold > FLOAT32_THRESHOLD


@dataclass(frozen=True)
class Spectrum:
    """Energies of inputs along old bases, and along the directions that these leave over.

    Attributes:
        total: |R|_F^2. [groups]
        surrogate: Energies along the old bases, the squared surrogate singular values of Eq. 6 and 7. [groups, k]
        energies: Energies along new directions, strongest first; never more than the true ones. [groups, r]
        find_directions: Function that returns so many of the new directions, strongest first: [groups, d, width].
        remainder: Energy that neither old bases nor new directions capture, or an upper bound of it; None for a whole
            spectrum. [groups]
        is_orthogonal: Whether the new directions are orthonormal and orthogonal to the old bases as they are.
    """

    total: Tensor
    surrogate: Tensor
    energies: Tensor
    find_directions: Callable[[int], Tensor]
    remainder: Tensor | None = None
    is_orthogonal: bool = False


class InputGram:
    """R R^T of representation rows: all that bases and importances depend on.

    The rows themselves are kept while there are fewer of them than dimensions, because their thin SVD is then cheaper
    than an eigendecomposition. From there on only their Gram matrix is kept, so the size is bounded by d x d.

    The bias of a layer is the weight of one more input that is always 1 (``constant=True``). That column is never
    appended to a batch: its row of the Gram matrix is the sum of the other columns.

    Args:
        groups: Number of independent inputs that are processed side by side (the groups of a convolution).
        dimension: Length of a row, without the constant.
        constant: Whether a constant 1 is part of every row.
        precise: Whether products are computed in float64, as sums are.

    Attributes:
        count: Number of rows.
        captured: Share of the energy that the bases grown from this matrix capture, [0, 1]; None before.
        leading: Largest share of the energy that one of these bases captures, [0, 1].
    """

    def __init__(self, groups: int, dimension: int, *, constant: bool = False, precise: bool = False) -> None:
        self.groups = groups
        self.inputs = dimension
        self.constant = constant
        self.precise = precise
        self.count = 0
        self.captured: float | None = None
        self.leading = 0.0
        self._rows: list[Tensor] = []
        self._gram: Tensor | None = None

    @classmethod
    def from_gram(cls, matrix: Tensor, count: int, inputs: int, *, constant: bool) -> InputGram:
        """Return the Gram matrix of a number of rows from its values: [groups, d, d] in float64."""
        gram = cls(matrix.shape[0], inputs, constant=constant, precise=True)
        gram._gram, gram.count = matrix, count
        return gram

    @property
    def kind(self) -> Kind:
        """How the matrix is kept."""
        return "float64"

    @property
    def is_folded(self) -> bool:
        """Whether the rows have been replaced by their Gram matrix."""
        return self._gram is not None

    @property
    def dimension(self) -> int:
        """Length of a row, the constant included."""
        return self.inputs + int(self.constant)

    @property
    def device(self) -> torch.device:
        """Device of the rows, or the CPU where that device has no float64."""
        stored = self._rows[0] if self._gram is None and self._rows else self._gram
        return torch.device("cpu") if stored is None else stored.device

    @property
    def nbytes(self) -> int:
        """Bytes in use now."""
        stored = self._rows if self._gram is None else [self._gram]
        return sum(tensor.nbytes for tensor in stored)

    def add(self, rows: Tensor) -> None:
        """Add rows: [groups, n, inputs].

        Raises:
            FloatingPointError: The rows hold NaN or an infinity, or numbers too large to square.
        """
        rows = place_rows(rows)
        self._check_shape(rows)
        # No entry of R R^T is larger than |R|_F^2. A norm that is NaN or infinite fails the comparison too, and so does
        # one that overflows in the type that the rows are multiplied in.
        dtype = torch.float64 if self.precise or rows.dtype == torch.float64 else torch.float32
        if not float(torch.linalg.vector_norm(rows, dtype=dtype)) < torch.finfo(dtype).max ** 0.5:
            raise FloatingPointError
        n = rows.shape[1]
        if self._gram is None:
            if self.count + n < self.dimension:
                # A copy, because the rows may be a view of an activation that is overwritten next.
                self._rows.append(rows.clone())
                self.count += n
                return
            self._fold()
        self._multiply(rows)
        self.count += n

    def get_rows(self) -> Tensor | None:
        """Return all rows [groups, n, d] in float64, the constant as last column; None once they are folded."""
        if self.is_folded:
            return None
        if not self._rows:
            return torch.zeros(self.groups, 0, self.dimension, dtype=torch.float64, device=self.device)
        return self._append_constant(torch.cat(self._rows, dim=1).double())

    def get_gram(self) -> Tensor:
        """Return R R^T [groups, d, d] in float64, once the rows are folded.

        Raises:
            RuntimeError: The rows are still kept.
        """
        if self._gram is None:
            raise RuntimeError("the rows have not been folded into a Gram matrix yet: use get_rows()")
        for first in range(0, self.inputs, STRIP):
            last = min(first + STRIP, self.inputs)
            self._gram[:, last:, first:last] = self._gram[:, first:last, last:].mT
        return self._gram

    def compute_energy(self) -> Tensor:
        """Return |R|_F^2 of each group, [groups]."""
        rows = self.get_rows()
        return self.get_gram().diagonal(dim1=1, dim2=2).sum(-1) if rows is None else rows.square().sum((1, 2))

    def compute_energy_through(self, matrix: Tensor) -> Tensor:
        """Return |A R|_F^2 of each group for matrices A [groups, out, d], [groups]."""
        matrix = matrix.to(self.device).double()
        rows = self.get_rows()
        if rows is None:
            return (matrix @ self.get_gram() * matrix).sum((1, 2))
        return (rows @ matrix.mT).square().sum((1, 2))

    def decompose(self, basis: Tensor, rank: Tensor, threshold: float) -> Spectrum:
        """Return the energies along old bases, and those along the directions that these leave over.

        Args:
            basis: Orthonormal old bases; zero columns beyond the rank. [groups, d, k] in float64
            rank: Number of bases of each group. [groups]
            threshold: Share of the energy that bases must capture. A whole spectrum does not depend on it.
        """
        rows = self.get_rows()
        return decompose_gram(self.get_gram(), basis, rank) if rows is None else decompose_rows(rows, basis)

    def clone(self) -> Self:
        """Return an independent copy."""
        return copy.deepcopy(self)

    def _check_shape(self, rows: Tensor) -> None:
        groups, _, inputs = rows.shape
        if (groups, inputs) != (self.groups, self.inputs):
            raise ValueError(f"rows of shape {tuple(rows.shape)} for {self.groups} groups of {self.inputs} inputs")

    def _append_constant(self, rows: Tensor) -> Tensor:
        return F.pad(rows, (0, 1), value=1.0) if self.constant else rows

    def _fold(self) -> None:
        """Replace the rows so far by their Gram matrix."""
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


class RowCount(InputGram):
    """The number of rows alone, of inputs on the meta device, which have no values."""

    def add(self, rows: Tensor) -> None:
        self.count += rows.shape[-2] if rows.dim() == 3 else len(rows)


def place_rows(rows: Tensor) -> Tensor:
    """Return rows without autograd history, on the CPU if their device has no float64 to sum them in."""
    rows = rows.detach()
    return rows if has_float64(rows.device) else rows.cpu()


def decompose_rows(rows: Tensor, basis: Tensor) -> Spectrum:
    """Return the spectrum of n < d rows [groups, n, d] from the thin SVD of what old bases leave of them."""
    coefficients = rows @ basis
    residual = rows - coefficients @ basis.mT  # Eq. 4
    left, sigma, _ = torch.linalg.svd(residual.mT, full_matrices=False)
    total, surrogate = rows.square().sum((1, 2)), coefficients.square().sum(1)
    return Spectrum(total, surrogate, sigma.square(), lambda width: left[..., :width])


def decompose_gram(gram: Tensor, basis: Tensor, rank: Tensor) -> Spectrum:
    """Return the spectrum of G = R R^T; what bases M leave over has the Gram matrix (I - M M^T) G (I - M M^T).

    That matrix is zero along M, so it is decomposed in coordinates of what M leaves over: the more bases there are, the
    smaller is the problem. The coordinates are those of the reflections Q of M = Q U, which are applied and never
    written out: the columns of Q after the rank are orthonormal and span what the bases do not.

    Args:
        gram: [groups, d, d]
        basis: Orthonormal columns; zero columns beyond the rank. [groups, d, k]
        rank: Number of bases of each group. [groups]
    """
    total = gram.diagonal(dim1=1, dim2=2).sum(-1)
    k, least = basis.shape[2], int(rank.min())
    if k == 0:
        energies, directions = torch.linalg.eigh(gram)
        surrogate = total.new_zeros(len(total), 0)
        return Spectrum(total, surrogate, energies.clamp(min=0).flip(-1), lambda width: _get_last(directions, width))
    reflections = torch.geqrf(basis)
    turned = torch.ormqr(*reflections, gram, transpose=True)  # Q^T G
    surrogate = (reflections[0][:, :k].triu().mT @ turned[:, :k] * basis.mT).sum(-1).clamp(min=0)  # M^T G = U^T Q^T G
    # Where groups differ in rank, M has zero columns, which make no reflection: their columns of Q are free too.
    is_free = (torch.arange(least, basis.shape[1], device=basis.device) >= rank.to(basis.device).unsqueeze(-1)).to(
        basis
    )
    free_gram = torch.ormqr(*reflections, turned[:, least:], left=False)[..., least:]
    energies, coordinates = torch.linalg.eigh(free_gram * is_free.unsqueeze(1) * is_free.unsqueeze(2))

    def find_directions(width: int) -> Tensor:
        found = _get_last(coordinates, width) * is_free.unsqueeze(2)
        # Not by F.pad, which refuses a width of 0 in torch 2.8.
        return torch.ormqr(*reflections, torch.cat([found.new_zeros(len(found), least, width), found], dim=1))

    return Spectrum(total, surrogate, energies.clamp(min=0).flip(-1), find_directions)


def _get_last(columns: Tensor, width: int) -> Tensor:
    """Return so many columns, from the last one on."""
    return columns[..., columns.shape[2] - width :].flip(-1)
