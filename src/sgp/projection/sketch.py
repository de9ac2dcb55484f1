"""The inputs of wide layers, collected in float32: half a Gram matrix, or a low-rank sketch with a certificate.

A sketch is Y = G Omega for d x l test directions Omega, of a Gram matrix G = R R^T that is never formed. Its Nystrom
approximation Y (Omega^T Y)^-1 Y^T never exceeds G, so the energy that directions capture of it is a lower bound of the
energy that they capture of G. Bases are accepted only if that bound reaches the threshold: this is the certificate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sgp.projection.gram import InputGram, Kind, Spectrum, decompose_gram, place_rows
from sgp.projection.subspace import UncertifiedError

# The first rows are kept as they are: at least so many, and half as many as there are dimensions. If the stream ends
# with them, they are decomposed in float64.
LEAST_BUFFER = 1024
# After that, rows are multiplied once there are so many of them.
ROWS_PER_PRODUCT = 256
# A triangular Gram matrix is stored in strips of so many rows, from the diagonal on.
STRIP = 256
# Where more than this share of the dimensions is needed, a sketch costs more than a Gram matrix, and subspace iteration
# more than a whole eigendecomposition.
WIDEST = 0.25
# Test directions of a sketch for each direction that the buffer needs: later rows have directions of their own.
OVERSAMPLING = 1.6
# And at least as many as leave this share of what the threshold allows to lose.
SPARE = 0.3
# The approximation loses some energy that the directions themselves would capture. Test directions are added once it
# loses more than the first share of what the threshold allows to lose: half as many, and as many above the second.
WIDEN, DOUBLE = 0.75, 1.2
# The loss is measured each time that the number of rows has grown by this factor.
CHECK_EVERY = 1.5
# Shift of the Nystrom approximation, over its trace. It covers the rounding of float32 products, and is subtracted from
# every energy again.
SHIFT = 2e-7


@dataclass(frozen=True)
class Effort:
    """How hard subspace iteration tries.

    Attributes:
        rounds: Number of multiplications of every column before its energy is measured.
        patience: It ends early where a power law that fits the energies so far needs more directions than this many
            times the widest that are tried. The law is pessimistic at first.
    """

    rounds: int
    patience: float


# On a Gram matrix, where giving up leads to a whole eigendecomposition; and on the first rows, which only choose test
# directions, and where giving up leads to a Gram matrix.
THOROUGH, BRIEF = Effort(rounds=2, patience=2.0), Effort(rounds=1, patience=1.0)

# Energies that are computed in float32 are off by less than this share of the total, which is counted as lost.
ROUNDING = 1e-6

Multiply = Callable[[Tensor], Tensor]


class WideGram(InputGram):
    """The inputs of a wide layer without groups, for thresholds that float32 can resolve.

    The first rows are kept. When they are many, a sketch replaces them if few directions capture enough of them and it
    is allowed; otherwise a float32 Gram matrix does.

    Args:
        dimension: Length of a row, without the constant.
        threshold: Share of the energy that bases must capture.
        constant: Whether a constant 1 is part of every row.
        basis: Orthonormal bases of earlier tasks [d, k], whose complement a sketch is of; None for none.
        can_sketch: Whether a sketch may be taken. Its certificate may fail, and the rows are needed again then.
        omega: Test directions of a sketch that is taken from the first row on, and never widened; None to choose
            them from the first rows. [d, l]
    """

    def __init__(
        self,
        dimension: int,
        threshold: float,
        *,
        constant: bool = False,
        basis: Tensor | None = None,
        can_sketch: bool = False,
        omega: Tensor | None = None,
    ) -> None:
        super().__init__(1, dimension, constant=constant)
        self.threshold = threshold
        self._basis = torch.zeros(self.dimension, 0, device="cpu") if basis is None else basis.float()
        self._can_sketch = can_sketch
        self._total = 0.0
        self._waiting = 0  # number of rows that were not multiplied yet
        self._store: TriangularGram | Sketch | None = None
        if omega is not None:
            self._store = Sketch(self._basis.to(omega.device), omega, can_widen=False)

    @classmethod
    def make_zero(cls, dimension: int, constant: bool, sketch: tuple[int, int] | None) -> WideGram:
        """Return the Gram matrix or the sketch of no rows, as a process without inputs adds it to those of others."""
        gram = cls(dimension, 1.0, constant=constant)
        if sketch is not None:
            basis, omega = (torch.zeros(gram.dimension, width, device="cpu") for width in sketch)
            gram._store = Sketch(basis, omega, can_widen=False)
        return gram

    @property
    def kind(self) -> Kind:
        if self._store is None:
            return "float64"
        return "sketch" if isinstance(self._store, Sketch) else "float32"

    @property
    def is_folded(self) -> bool:
        return self._store is not None

    @property
    def device(self) -> torch.device:
        if self._store is not None:
            return self._store.device
        return self._rows[0].device if self._rows else torch.device("cpu")

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self._rows) + (0 if self._store is None else self._store.nbytes)

    @property
    def sketch_shape(self) -> tuple[int, int] | None:
        """Numbers of bases and of test directions of a sketch; None where there is none."""
        if not isinstance(self._store, Sketch):
            return None
        return self._store.basis.shape[1], self._store.product.shape[1]

    def choose_omega(self, factor: float) -> Tensor | None:
        """Return test directions for more rows than these, some times as many; None if a sketch is not worth it.

        Args:
            factor: Number of test directions for each one of the sketch of these rows.
        """
        if not isinstance(self._store, Sketch) or self._store.omega is None:
            return None
        width = int(factor * self._store.omega.shape[1])
        return _extend(self._store.omega, width, self._store.basis) if _can_have(width, self._store.basis) else None

    def reduce(self, reduce: Callable[[Tensor], Tensor], count: int) -> WideGram:
        """Return the sum over several processes.

        Args:
            reduce: Function that sums a tensor over all processes.
            count: Number of rows of all processes.
        """
        self.fold()
        merged = self.clone()
        assert merged._store is not None
        merged._store.reduce_(reduce)
        merged._total = float(reduce(torch.tensor(self._total, dtype=torch.float64, device=self.device)))
        merged.count = count
        return merged

    def add(self, rows: Tensor) -> None:
        rows = place_rows(rows)
        self._check_shape(rows)
        n = rows.shape[1]
        # Squares are summed by row in float32, and then in float64: a sum over everything is off by 1e-4 in float32.
        energy = float(torch.linalg.vector_norm(rows, dim=2, dtype=torch.float32).double().square().sum())
        energy += n * self.constant
        if not self._total + energy < torch.finfo(torch.float32).max:  # NaN and infinities fail too
            raise FloatingPointError
        self._total += energy
        self.count += n
        self._waiting += n
        is_due = self._waiting >= (ROWS_PER_PRODUCT if self.is_folded else count_buffer_rows(self.dimension))
        # A copy unless they are multiplied now: rows may be a view of an activation that is overwritten next.
        self._rows.append(rows if is_due else rows.clone())
        if is_due:
            self._multiply_waiting()

    def get_gram(self) -> Tensor:
        self.fold()
        if not isinstance(self._store, TriangularGram):
            raise RuntimeError("a sketch has no Gram matrix")
        return self._store.to_dense().double().unsqueeze(0)

    def compute_energy(self) -> Tensor:
        return torch.tensor([self._total], dtype=torch.float64, device=self.device)

    def decompose(self, basis: Tensor, rank: Tensor, threshold: float) -> Spectrum:
        if self._store is None and self.count < self.dimension:
            return super().decompose(basis, rank, threshold)
        self.fold()
        total = self._total * (1 + ROUNDING)
        if isinstance(self._store, Sketch):
            if basis.shape[2] != self._basis.shape[1]:
                raise ValueError(
                    f"a sketch beside {self._basis.shape[1]} bases cannot be decomposed beside {basis.shape[2]}: "
                    "take GradientMemory(gram='float64')"
                )
            return self._store.decompose(total)
        assert self._store is not None
        return _decompose_triangular(self._store, basis[0].float(), rank, total, threshold)

    def fold(self) -> None:
        """Multiply all rows that were kept so far; without a sketch, into a float32 Gram matrix."""
        if self._store is None:
            self._store = TriangularGram(self.dimension, self.device)
        if self._rows:
            self._multiply_waiting()

    def _multiply_waiting(self) -> None:
        kept = [self._append_constant(rows.float())[0] for rows in self._rows]
        rows = kept[0] if len(kept) == 1 else torch.cat(kept)
        self._rows, self._waiting = [], 0
        del kept
        if self._store is None:
            sketch = self._start_sketch(rows) if self._can_sketch else None
            self._store = sketch or TriangularGram(self.dimension, rows.device)
        self._store.add_(rows)
        if isinstance(self._store, Sketch):
            self._store.widen_if_needed_(rows, self._total, (1 - self.threshold) * self._total)

    def _start_sketch(self, rows: Tensor) -> Sketch | None:
        """Return an empty sketch whose test directions are chosen for some rows, or None if it would be too wide."""
        basis = self._basis.to(rows.device)
        residual = rows - (rows @ basis) @ basis.mT
        energy = _sum_squares(residual)
        allowed = (1 - self.threshold) * self._total
        leading, few, many = residual[:0].mT, 0, 0
        if energy > SPARE * allowed:
            found = find_leading(
                lambda columns: residual.mT @ (residual @ columns),
                self.dimension,
                energy,
                SPARE * allowed,
                BRIEF,
                rows.device,
            )
            if found is None:
                return None
            values, leading = found
            left = energy - torch.cat([values.new_zeros(1), values]).cumsum(0)  # by number of directions
            few, many = int((left > allowed).sum()), int((left > SPARE * allowed).sum())
        width = max(int(OVERSAMPLING * few), many, 32) + 16
        if not _can_have(width, basis):
            return None
        return Sketch(basis, _extend(leading[:, : int(0.8 * width)], width, basis))


class TriangularGram:
    """R R^T in float32, of which only strips from the diagonal on are stored.

    Args:
        dimension: Number of rows of the matrix.
        device: Device of the strips.
    """

    def __init__(self, dimension: int, device: torch.device) -> None:
        self.dimension = dimension
        self.strips = [
            torch.zeros(min(STRIP, dimension - first), dimension - first, device=device)
            for first in range(0, dimension, STRIP)
        ]

    @property
    def device(self) -> torch.device:
        """Device of the strips."""
        return self.strips[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of the strips."""
        return sum(strip.nbytes for strip in self.strips)

    def add_(self, rows: Tensor) -> None:
        """Add the products of rows: [n, d]."""
        for first, last, strip in self._iterate():
            strip.addmm_(rows[:, first:last].mT, rows[:, first:])

    def multiply(self, columns: Tensor) -> Tensor:
        """Return the matrix times columns, [d, l] -> [d, l]."""
        product = torch.zeros_like(columns)
        for first, last, strip in self._iterate():
            product[first:last] += strip @ columns[first:]
            product[last:] += strip[:, last - first :].mT @ columns[first:last]
        return product

    def reduce_(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Replace the strips by their sums over several processes."""
        self.strips = [reduce(strip) for strip in self.strips]

    def to_dense(self) -> Tensor:
        """Return the whole matrix, [d, d]."""
        dense = torch.empty(self.dimension, self.dimension, device=self.device)
        for first, last, strip in self._iterate():
            dense[first:last, first:] = strip
            dense[last:, first:last] = strip[:, last - first :].mT
        return dense

    def _iterate(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the first row of each strip, the row after its last one, and the strip."""
        for index, strip in enumerate(self.strips):
            yield index * STRIP, index * STRIP + len(strip), strip


class Sketch:
    """Y = G Omega for the Gram matrix G of rows, and what rows have along old bases.

    Args:
        basis: Orthonormal bases M of earlier tasks. [d, k]
        omega: Orthonormal test directions, orthogonal to the bases. [d, l]
        can_widen: Whether test directions may be added.
    """

    def __init__(self, basis: Tensor, omega: Tensor, *, can_widen: bool = True) -> None:
        self.basis = basis
        self.omega: Tensor | None = omega  # None once more test directions were needed than a sketch is worth
        self.product = torch.zeros_like(omega)
        self.surrogate = torch.zeros(basis.shape[1], dtype=torch.float64, device=basis.device)
        self.count = 0
        self._next_check = 0.0 if can_widen else math.inf
        self._shift = 0.0  # by which the product may exceed that of the rows

    @property
    def device(self) -> torch.device:
        """Device of the product."""
        return self.product.device

    @property
    def nbytes(self) -> int:
        """Bytes of test directions and product; the bases are the layer's own."""
        return self.product.nbytes + (0 if self.omega is None else self.omega.nbytes)

    def add_(self, rows: Tensor) -> None:
        """Add rows: [n, d]."""
        self.count += len(rows)
        if self.omega is not None:
            self.surrogate += (rows @ self.basis).square().sum(0, dtype=torch.float64)
            self.product.addmm_(rows.mT, rows @ self.omega)

    def widen_if_needed_(self, rows: Tensor, total: float, allowed: float) -> None:
        """Add test directions when the approximation loses too much of the energy.

        Args:
            rows: Last rows, whose residual gives half of the new directions; the others are random. [n, d]
            total: Energy of all rows so far.
            allowed: Energy that bases may leave over.
        """
        if self.omega is None or self.count < self._next_check:
            return
        self._next_check = CHECK_EVERY * self.count
        try:
            factor, shift = self._factor(self.omega)
        except UncertifiedError:
            self._give_up()
            return
        lost = total - float(self.surrogate.sum()) - (_sum_squares(factor) - factor.shape[1] * (shift + self._shift))
        if lost <= WIDEN * allowed:
            return
        old = self.omega.shape[1]
        width = 2 * old if lost > DOUBLE * allowed else old + old // 2
        if not _can_have(width, self.basis):
            self._give_up()
            return
        known = torch.cat([self.basis, self.omega], dim=1)
        residual = rows - (rows @ known) @ known.mT
        noise = _draw(len(rows), (width - old) // 2, old, rows.device)
        self.omega = _extend(torch.cat([self.omega, residual.mT @ noise], dim=1), width, self.basis)
        # The approximation takes the place of the rows so far. It never exceeds their Gram matrix by more than the
        # shift, so what is computed from it and from later rows is a lower bound still.
        self.product = (factor @ (factor.mT @ self.omega.double()) - shift * _project(self.omega, old)).float()
        self._shift += shift

    def _give_up(self) -> None:
        """Free the memory of a sketch that cannot certify the threshold any more."""
        self.omega, self.product = None, self.product[:, :0].clone()

    def decompose(self, total: float) -> Spectrum:
        """Return the energies along the bases, and lower bounds of those along the directions that these leave over.

        Args:
            total: Energy of all rows.
        """
        energy = torch.tensor([total], dtype=torch.float64, device=self.device)
        surrogate = self.surrogate.unsqueeze(0)
        rest = (energy - surrogate.sum(1)).clamp(min=0)
        if self.omega is None or not rest:
            return _make_empty_spectrum(energy, surrogate, rest, len(self.product))
        factor, shift = self._factor(self.omega)
        values, vectors = torch.linalg.eigh(factor.mT @ factor)
        energies = (values.flip(0) - shift - self._shift).clamp(min=0)

        def find_directions(width: int) -> Tensor:
            found = factor @ vectors.flip(1)[:, :width]
            return orthonormalize(found / found.norm(dim=0).clamp(min=1e-300), self.basis).unsqueeze(0)

        remainder = (rest - energies.sum()).clamp(min=0)
        return Spectrum(energy, surrogate, energies.unsqueeze(0), find_directions, remainder, is_orthogonal=True)

    def reduce_(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Replace product and surrogate energies by their sums over several processes with the same directions."""
        self.product, self.surrogate = reduce(self.product), reduce(self.surrogate)

    def _factor(self, omega: Tensor) -> tuple[Tensor, float]:
        """Return B [d, l] in float64 and a shift, so that B B^T is at most the Gram matrix plus the shift.

        B B^T is the Nystrom approximation of the shifted Gram matrix of what the bases leave over.

        Raises:
            UncertifiedError: Rounding is larger than what a shift can cover.
        """
        product = (self.product - self.basis @ (self.basis.mT @ self.product)).double()
        tests = omega.double()
        core = tests.mT @ product
        core, overlap = (core + core.mT) / 2, tests.mT @ tests
        shift = SHIFT * max(float(core.trace()), torch.finfo(torch.float32).tiny)
        lower, failed = torch.linalg.cholesky_ex(core + shift * overlap)
        while failed:  # rounding beyond what the shift covers
            if shift > float(core.trace()):
                raise UncertifiedError("a sketch is of dependent test directions: take GradientMemory(gram='float32')")
            shift *= 10
            lower, failed = torch.linalg.cholesky_ex(core + shift * overlap)
        product += shift * tests
        return torch.linalg.solve_triangular(lower, product.mT, upper=False).mT, shift


def count_buffer_rows(dimension: int) -> int:
    """Return how many rows of a dimension are kept as they are."""
    return max(LEAST_BUFFER, dimension // 2)


def bound_wide_bytes(dimension: int) -> int:
    """Return the most bytes that a :class:`WideGram` takes: kept rows or a Gram matrix, and rows that wait."""
    stored = max(count_buffer_rows(dimension), (dimension + STRIP) // 2)
    return 4 * dimension * (stored + ROWS_PER_PRODUCT)


def find_leading(
    multiply: Multiply, dimension: int, energy: float, target: float, effort: Effort, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Find directions of a symmetric matrix that leave at most some energy, by subspace iteration.

    Args:
        multiply: Function that multiplies the matrix with columns. [d, l] -> [d, l]
        dimension: Number of rows of the matrix.
        energy: Trace of the matrix.
        target: Energy that the directions may leave over.
        effort: How hard to try.
        device: Device of the matrix.

    Returns:
        Captured energies, strongest first [l] in float64, and orthonormal directions [d, l]; None if more than the
        share ``WIDEST`` of all directions is needed.
    """
    widest = max(1, int(WIDEST * dimension))
    width = min(max(32, widest // 8), widest)
    product = torch.zeros(dimension, 0, device=device)
    while True:
        new = multiply(_draw(dimension, width - product.shape[1], product.shape[1], device))
        columns = torch.linalg.qr(torch.cat([product, new], dim=1)).Q
        for _ in range(effort.rounds - 1):
            columns = torch.linalg.qr(multiply(columns)).Q
        product = multiply(columns)
        core = (columns.mT @ product).double()
        values, rotation = torch.linalg.eigh((core + core.mT) / 2)
        values, rotation = values.flip(0), rotation.flip(1).float()
        left = energy - float(values.sum())
        if left <= target:
            return values, columns @ rotation
        # Energies of real inputs fall off as a power, so two points tell about how many directions are needed.
        half = energy - float(values[: width // 2].sum())
        fall = max(math.log2(half / left), 1e-3)
        needed = width * min((left / target) ** (1 / fall), 1e6) if target > 0 else math.inf
        if width >= widest or needed > effort.patience * widest:
            return None
        product = product @ rotation
        width = min(max(int(1.2 * needed), width + width // 3), 4 * width, widest)


def orthonormalize(columns: Tensor, basis: Tensor) -> Tensor:
    """Return columns that are nearly orthonormal, and nearly orthogonal to a basis, so to the rounding of float32.

    Args:
        columns: [d, l]
        basis: Orthonormal columns. [d, k]

    Returns:
        Columns in float64; each spans with its predecessors what it did before. [d, l]
    """
    columns = columns.float()
    columns = columns - basis @ (basis.mT @ columns)
    core = torch.zeros(columns.shape[1], columns.shape[1], dtype=torch.float64, device=columns.device)
    for block in torch.split(columns, STRIP):  # float64 copies of blocks only
        core.addmm_(block.double().mT, block.double())
    upper, failed = torch.linalg.cholesky_ex(core, upper=True)
    orthonormal: Tensor
    if failed:  # columns that were hardly independent
        orthonormal = torch.linalg.qr(columns.double()).Q
    else:
        orthonormal = torch.linalg.solve_triangular(upper, columns.double(), upper=True, left=False)
    return orthonormal


def _decompose_triangular(
    gram: TriangularGram, basis: Tensor, rank: Tensor, total: float, threshold: float
) -> Spectrum:
    """Return the part of a spectrum that leaves at most some energy, or a whole one where that is cheaper."""
    along = gram.multiply(basis)
    surrogate = (basis * along).sum(0, dtype=torch.float64).clamp(min=0)
    rest = max(total - float(surrogate.sum()), 0.0)
    energy, allowed = surrogate.new_tensor([total]), (1 - threshold) * total
    if rest <= allowed:
        return _make_empty_spectrum(energy, surrogate.unsqueeze(0), surrogate.new_tensor([rest]), gram.dimension)

    def multiply(columns: Tensor) -> Tensor:
        columns = columns - basis @ (basis.mT @ columns)
        product = gram.multiply(columns)
        return product - basis @ (basis.mT @ product)

    found = find_leading(multiply, gram.dimension, rest, allowed, THOROUGH, gram.device)
    if found is None:
        whole = decompose_gram(gram.to_dense().unsqueeze(0), basis.unsqueeze(0), rank)
        energies = whole.energies[0].double()
    else:
        energies, columns = found

    def find_directions(width: int) -> Tensor:
        directions = whole.find_directions(width)[0] if found is None else columns[:, :width]
        return orthonormalize(directions, basis).unsqueeze(0)

    remainder = surrogate.new_tensor([max(rest - float(energies.sum()), 0.0)])
    energies = energies.clamp(min=0).unsqueeze(0)
    return Spectrum(energy, surrogate.unsqueeze(0), energies, find_directions, remainder, is_orthogonal=True)


def _make_empty_spectrum(total: Tensor, surrogate: Tensor, rest: Tensor, dimension: int) -> Spectrum:
    """Return a spectrum without new directions."""
    nothing = total.new_zeros(1, 1)
    return Spectrum(total, surrogate, nothing, lambda width: total.new_zeros(1, dimension, width), rest)


def _can_have(width: int, basis: Tensor) -> bool:
    """Return whether a sketch of so many test directions beside a basis is worth it."""
    dimension, k = basis.shape
    return width <= min(WIDEST * dimension, dimension - k)


def _extend(columns: Tensor, width: int, basis: Tensor) -> Tensor:
    """Return orthonormal columns that span given ones, with random ones up to a width, orthogonal to a basis."""
    given = columns.shape[1]
    columns = torch.cat([columns, _draw(len(columns), width - given, given, columns.device)], dim=1)
    for _ in range(2):  # twice is enough: the second pass removes the rounding of the first
        columns = torch.linalg.qr(columns - basis @ (basis.mT @ columns)).Q
    # The bound needs them orthogonal to the basis, also where QR had to make up columns for dependent ones.
    return columns - basis @ (basis.mT @ columns)


def _project(omega: Tensor, old: int) -> Tensor:
    """Return the part of test directions along the first of them: these are orthonormal."""
    kept = torch.zeros_like(omega, dtype=torch.float64)
    kept[:, :old] = omega[:, :old]
    return kept


def _draw(rows: int, columns: int, seed: int, device: torch.device) -> Tensor:
    """Return random numbers that are the same in every run."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, device="cpu").to(device)


def _sum_squares(rows: Tensor) -> float:
    """Return |R|_F^2, summed by row in float32 at most and then in float64."""
    return float(rows.square().sum(1).sum(dtype=torch.float64))
