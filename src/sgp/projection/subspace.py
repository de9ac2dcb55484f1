"""Bases of a layer's inputs and their importances: every equation of the paper's method section, once.

Orientation: the paper writes representations and gradients as columns (d x n, d x out). Rows are used here,
as PyTorch stores them, so the paper's ``M^T R`` is ``rows @ M``. All tensors have a leading ``groups``
dimension: the groups of a convolution have inputs, and so subspaces, of their own, which are computed side by
side. Other layers have one group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from sgp.projection.gram import InputGram
from sgp.projection.precision import to_float64

ROUNDING = 2.0**-52
# Bases are stored in float32. What they leave over of an input that lies in them is rounding of that size, squared
# because energies are compared, and no new direction.
STORED_ROUNDING = 2.0**-46
# The same for bases that are stored in fewer bits: the square of their relative error.
COMPRESSED_ROUNDING = {torch.bfloat16: 2.0**-16, torch.int8: 2.0**-12}

# Type in which bases are stored. A step computes with the stored bases, so a saved memory is the live one to the bit.
Store = Literal["float32", "bfloat16", "int8"]
STORES = ("float32", "bfloat16", "int8")

# Number of directions that a task adds to the bases [groups], from the energies along the old bases [groups, k], the
# energies along the directions that these leave over, strongest first [groups, r], the total [groups] and the
# threshold.
Choice = Callable[[Tensor, Tensor, Tensor, float], Tensor]


class UncertifiedError(ArithmeticError):
    """The certificate of a sketch does not reach the threshold: the layer's inputs are needed again."""


@dataclass(frozen=True)
class Numerics:
    """Choices where the published code and the paper's text differ inside an update.

    Attributes:
        first_rank: ``"minimal"`` is the smallest rank that satisfies Eq. 1; ``"one-less"`` is that rank minus one,
            as in the published image experiments.
        truncation: ``"before"`` drops new bases that would exceed the dimension before importances are computed;
            ``"after"`` drops them after they took part in the normalization of Eq. 2.
        orthogonalise: Whether new bases are made orthogonal to the old ones again, to rounding. The published code
            does not.
    """

    first_rank: Literal["minimal", "one-less"] = "minimal"
    truncation: Literal["before", "after"] = "before"
    orthogonalise: bool = True


def find_minimal_rank(energies: Tensor, total: Tensor, threshold: float, remainder: Tensor | None = None) -> Tensor:
    """Return the smallest k whose k strongest directions satisfy Eq. 1 (first task) and Eq. 5 (later tasks).

    Both require that the energy that is *not* captured be at most (1 - threshold) of the total. Summing the discarded
    energy, from the weakest direction up, stays exact at thresholds near 1, where summing up to the threshold adds
    noise directions.

    Args:
        energies: Squared singular values of what the old bases leave over, descending. [groups, r]
        total: |R|_F^2. [groups]
        threshold: The paper's epsilon_th, in (0, 1].
        remainder: Energy beyond these directions, if they are not all. [groups]

    Returns:
        [groups] int64.

    Raises:
        UncertifiedError: All of the directions together do not satisfy the equations.
    """
    discarded = energies.flip(-1).cumsum(-1).flip(-1)  # discarded[k] is what remains if k directions are kept
    dimension = energies.shape[-1]
    allowed = ((1.0 - threshold) + dimension * ROUNDING) * total
    if remainder is not None:
        if bool((remainder > allowed).any()):
            captured = float((1 - remainder / total).min())
            raise UncertifiedError(
                f"a sketch certifies {captured:.4%} of the energy, below the threshold of {threshold:.4%}: collect the "
                "inputs once more, with GradientMemory(gram='float32')"
            )
        discarded = discarded + remainder.unsqueeze(-1)
    return (discarded > allowed.unsqueeze(-1)).sum(-1)


def compute_importance(sigma: Tensor, alpha: float) -> Tensor:
    """Return the importance of each basis for one task from its singular value, Eq. 2. [groups, k] -> [groups, k].

    The strongest basis gets exactly 1. ``alpha=inf`` is the limit, GPM: every basis gets exactly 1.
    """
    strongest = sigma.amax(-1, keepdim=True) if sigma.shape[-1] else sigma
    if math.isinf(alpha):
        scaled = torch.ones_like(sigma)
    else:
        # An all-zero representation has no strongest direction and gives no basis any importance.
        scaled = (alpha + 1.0) * sigma / (alpha * sigma + strongest).where(strongest > 0, 1.0)
    scaled = scaled.where(sigma != strongest, 1.0)
    return scaled.where(strongest > 0, 0.0)


def accumulate_importance(old: Tensor, new: Tensor) -> Tensor:
    """Return the importance over all tasks so far, at most 1, Eq. 10."""
    return (old + new).clamp(max=1.0)


class Bases(ABC):
    """Bases and importances of a layer's inputs, in any form.

    Attributes:
        importance: Importances lambda in [0, 1]; zero beyond the rank. [groups, k]
        rank: Number of bases of each group. [groups] int64
    """

    importance: Tensor
    rank: Tensor

    @property
    @abstractmethod
    def groups(self) -> int:
        """Number of groups."""

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Length of a basis vector, the constant input of a protected bias included."""

    @property
    def width(self) -> int:
        """Number of bases of the group that has the most."""
        return self.importance.shape[1]

    @property
    def is_empty(self) -> bool:
        """Whether there are no bases."""
        return self.width == 0

    @property
    def nbytes(self) -> int:
        """Bytes of bases and importances as they are stored."""
        return sum(tensor.nbytes for tensor in self.state_dict().values())

    @property
    def blocked(self) -> int:
        """Number of bases of importance 1, along which no weight moves."""
        return int((self.importance == 1).sum())

    @property
    def free(self) -> float:
        """Free capacity: one minus the mean importance over all dimensions."""
        return 1.0 - float(to_float64(self.importance).sum()) / (self.groups * self.dimension)

    @property
    def is_compressed(self) -> bool:
        """Whether the bases are stored in fewer bits than a step computes with."""
        return False

    @property
    @abstractmethod
    def is_consistent(self) -> bool:
        """Whether there are as many importances as bases; a damaged file may have others."""

    @abstractmethod
    def to(self, device: torch.device, dtype: torch.dtype) -> Bases:
        """Return the bases on a device and in a type; the same object if nothing changes."""

    @abstractmethod
    def compress(self, store: Store) -> Bases:
        """Return the bases rounded to the type they are stored in. Bases that were rounded before stay as they are."""

    @abstractmethod
    def with_importance(self, importance: Tensor) -> Bases:
        """Return the same bases with other importances."""

    def resize(self, dimension: int) -> Bases:
        """Return the bases for inputs of another dimension if they can be resized, and the same object otherwise."""
        return self

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return bases and importances as tensors by name."""

    @abstractmethod
    def grow(
        self,
        gram: InputGram,
        *,
        threshold: float,
        alpha: float,
        numerics: Numerics | None = None,
        choose: Choice | None = None,
    ) -> Bases:
        """Return the bases after one more task (Algorithm 1, the body of the loop over layers).

        Args:
            gram: Gram matrix of the task's inputs.
            threshold: The paper's epsilon_th of Eq. 1 and 5.
            alpha: Scale coefficient of Eq. 2; ``math.inf`` is GPM.
            numerics: Choices where the published code differs from the paper's text.
            choose: Function that returns the number of directions to add, instead of the fewest that reach the
                threshold.

        Raises:
            UncertifiedError: The Gram matrix is a sketch that does not certify the threshold.
        """

    @abstractmethod
    def subtract_projection_(
        self, source: Tensor, source_bias: Tensor | None, target: Tensor, target_bias: Tensor | None
    ) -> None:
        """Subtract the blocked part of the source from the target in place: source M Lambda M^T, Eq. 3.

        With the source as its own target this projects a gradient. With a weight change as source and the weight as
        target it projects the step that an optimizer applied.

        Args:
            source: Matrices whose last dimension is the input's. [groups, out, inputs]
            source_bias: Column of the constant input, if there is one. [groups, out]
            target: Matrices like the source.
            target_bias: Column like the source's.
        """

    @abstractmethod
    def compute_captured_energy(self, gram: InputGram) -> Tensor:
        """Return the energy of inputs that lies in the bases, of each group, [groups]."""

    @abstractmethod
    def compute_blocked_coefficients(self, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the coefficients of matrices along each basis of importance 1, and zeros elsewhere. [groups, out, k].

        Args:
            matrix: Matrices whose last dimension is the input's. [groups, out, inputs]
            bias: Column of the constant input, if there is one. [groups, out]
        """

    def compute_blocked_share(self, matrix: Tensor, bias: Tensor | None = None) -> float:
        """Return the share of the norm of matrices that lies along bases of importance 1.

        Args:
            matrix: As in :meth:`compute_blocked_coefficients`.
            bias: As in :meth:`compute_blocked_coefficients`.
        """
        blocked = self.compute_blocked_coefficients(matrix, bias)
        return float(blocked.norm()) / max(float(matrix.norm()), torch.finfo(matrix.dtype).tiny)


@dataclass(frozen=True)
class Subspace(Bases):
    """Bases M and accumulated importances lambda of one layer's inputs. Immutable: ``grow`` returns a new object.

    Attributes:
        basis: Orthonormal columns; where groups differ in rank, the others are zero columns. [groups, d, k]
        importance: Importances lambda in [0, 1]; zero beyond the rank. [groups, k]
        rank: Number of bases of each group. [groups] int64
        scale: Factor of each column, where the columns are stored as int8. [groups, k]
        lean: Whether a dense projector would cost more to compute than it saves, because it is used once.
    """

    basis: Tensor
    importance: Tensor
    rank: Tensor
    scale: Tensor | None = None
    lean: bool = False

    @staticmethod
    def empty(groups: int, dimension: int) -> Subspace:
        """Return a subspace without bases."""
        return Subspace(
            torch.zeros(groups, dimension, 0), torch.zeros(groups, 0), torch.zeros(groups, dtype=torch.int64)
        )

    @property
    def groups(self) -> int:
        """Number of groups."""
        return self.basis.shape[0]

    @property
    def dimension(self) -> int:
        """Length of a basis vector, the constant input of a protected bias included."""
        return self.basis.shape[1]

    def to(self, device: torch.device, dtype: torch.dtype) -> Subspace:
        if self.basis.device == device and self.basis.dtype == dtype:
            return self
        # Move before the conversion: the old device may not have the type.
        basis, importance = self.basis.to(device).to(dtype), self.importance.to(device).to(dtype)
        if self.scale is not None:
            basis *= self.scale.to(device).to(dtype).unsqueeze(1)
        # No step computes with the rank, so it stays where it is.
        return Subspace(basis, importance, self.rank, lean=self.is_compressed)

    @property
    def is_compressed(self) -> bool:
        return self.basis.dtype in (torch.bfloat16, torch.int8)

    @property
    def is_consistent(self) -> bool:
        shape = (self.groups, self.basis.shape[2])
        fits = self.importance.shape == shape and self.rank.shape == (self.groups,)
        return fits and (self.scale is None or self.scale.shape == shape)

    def compress(self, store: Store) -> Subspace:
        if store == "float32" and not self.is_compressed:
            return self
        basis = self.to(self.basis.device, torch.float32).basis
        if store == "int8":
            steps = basis.abs().amax(1, keepdim=True) / 127
            whole = (basis / steps.where(steps > 0, 1.0)).round()
            norm = whole.norm(dim=1)
            # Normalize the columns again, so that a step along one is subtracted in full.
            scale = (1 / norm.where(norm > 0, 1.0)).where(norm > 0, 0.0)
            return Subspace(whole.to(torch.int8), self.importance, self.rank, scale)
        dtype = torch.bfloat16 if store == "bfloat16" else torch.float32
        return Subspace(basis.to(dtype), self.importance, self.rank)

    def with_importance(self, importance: Tensor) -> Subspace:
        return replace(self, importance=importance)

    def get_orthonormal_basis(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the bases in a type, orthonormal also where they are stored in fewer bits, [groups, d, k]."""
        basis = self.to(device, dtype).basis
        return _orthonormalize(basis) if self.is_compressed else basis

    def compute_captured_energy(self, gram: InputGram) -> Tensor:
        return gram.compute_energy_through(self.to(gram.device, torch.float64).basis.mT)

    def compute_blocked_coefficients(self, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        basis = self.to(matrix.device, matrix.dtype).basis
        is_blocked = (self.importance == 1).to(matrix.device)
        return compute_coefficients(basis * is_blocked.unsqueeze(1), matrix, bias)

    def state_dict(self) -> dict[str, Tensor]:
        state = {"basis": self.basis, "importance": self.importance, "rank": self.rank}
        return state if self.scale is None else state | {"scale": self.scale}

    def grow(
        self,
        gram: InputGram,
        *,
        threshold: float,
        alpha: float,
        numerics: Numerics | None = None,
        choose: Choice | None = None,
    ) -> Subspace:
        # One decomposition is enough. The paper takes a second SVD for the importances of the old bases, but Eq. 6 and
        # 7, written out, say that the surrogate singular value of basis m_i is |m_i^T R|.
        if gram.count == 0:
            return self
        numerics = numerics or Numerics()
        kept_basis = self.to(gram.device, torch.float64).basis
        M = self.get_orthonormal_basis(gram.device, torch.float64)
        spectrum = gram.decompose(M, self.rank, threshold)
        total, surrogate, energies = spectrum.total, spectrum.surrogate, spectrum.energies
        old_rank = self.rank.to(M.device)

        if choose is None:
            new = find_minimal_rank(energies, total, threshold, spectrum.remainder)
        elif spectrum.remainder is None:
            new = choose(surrogate, energies, total, threshold)
        else:
            raise ValueError("choose= needs the energies of all directions: take GradientMemory(gram='float64')")
        if numerics.first_rank == "one-less":
            new = torch.where(old_rank == 0, (new - 1).clamp(min=0), new)
        largest = torch.cat([surrogate, energies], dim=-1).amax(-1)
        stored_rounding = COMPRESSED_ROUNDING.get(self.basis.dtype, self.dimension * STORED_ROUNDING)
        floor = torch.where(old_rank == 0, self.dimension * ROUNDING, stored_rounding) * largest
        new = torch.minimum(new, (energies > floor.unsqueeze(-1)).sum(-1))
        if numerics.truncation == "before":
            new = torch.minimum(new, self.dimension - old_rank)
        width = int(new.max())
        directions = spectrum.find_directions(width)
        if numerics.orthogonalise and not spectrum.is_orthogonal:
            directions = _orthogonalize(M, directions)

        # Eq. 8: surrogate singular values of the old bases, then singular values of the new ones.
        kept_new = torch.arange(width, device=M.device) < new.unsqueeze(-1)
        kept_old = torch.arange(M.shape[2], device=M.device) < old_rank.unsqueeze(-1)
        sigma_new = energies[..., :width].sqrt().where(kept_new, 0.0)
        sigma = torch.cat([surrogate.sqrt().where(kept_old, 0.0), sigma_new], dim=-1)
        shares = sigma.square() / total.where(total > 0, 1.0).unsqueeze(-1)
        gram.captured = float(shares.sum(-1).mean())
        gram.leading = float(shares.max()) if shares.numel() else 0.0
        task = compute_importance(sigma, alpha)
        k = M.shape[2]
        lambda_old = accumulate_importance(self.importance.to(task.device).to(task), task[..., :k])
        kept = torch.cat([kept_old, kept_new], dim=-1)
        basis = torch.cat([kept_basis, directions], dim=-1)
        lambdas = torch.cat([lambda_old, task[..., k:]], dim=-1)
        return _pack(basis, lambdas, kept, self.dimension)

    def subtract_projection_(
        self, source: Tensor, source_bias: Tensor | None, target: Tensor, target_bias: Tensor | None
    ) -> None:
        inputs = source.shape[-1]
        if self._prefers_dense:
            dense = self._projector
            removed = torch.matmul(source, dense[:, :inputs])
            if source_bias is not None:
                removed += source_bias.unsqueeze(-1) * dense[:, inputs:]
            target -= removed[..., :inputs]
            if target_bias is not None:
                target_bias -= removed[..., inputs]
            return
        M = self.basis
        coefficients = compute_coefficients(M, source, source_bias)
        coefficients *= self.importance.unsqueeze(1)
        target.baddbmm_(coefficients, M[:, :inputs].mT, alpha=-1)
        if target_bias is not None:
            target_bias -= torch.matmul(coefficients, M[:, inputs].unsqueeze(-1)).squeeze(-1)

    def compute_blocked_part(self, source: Tensor, source_bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return what :meth:`subtract_projection_` would subtract, as new tensors through which gradients flow.

        Args:
            source: Matrices whose last dimension is the input's. [groups, out, inputs]
            source_bias: Column of the constant input, if the subspace has one. [groups, out]
        """
        inputs = source.shape[-1]
        coefficients = compute_coefficients(self.basis, source, source_bias) * self.importance.unsqueeze(1)
        if source_bias is None:
            return coefficients @ self.basis[:, :inputs].mT, None
        part = coefficients @ self.basis.mT
        return part[..., :inputs], part[..., inputs]

    @property
    def _prefers_dense(self) -> bool:
        """Whether two products with M cost more than one with M Lambda M^T, as they do above half the dimension."""
        return 2 * self.basis.shape[2] > self.dimension and not self.lean

    @cached_property
    def _projector(self) -> Tensor:
        """M Lambda M^T, [groups, d, d]."""
        return (self.basis * self.importance.unsqueeze(1)) @ self.basis.mT


def compute_coefficients(basis: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """Return the coefficients of matrices along each basis. [groups, out, k].

    Args:
        basis: Bases. [groups, d, k]
        matrix: Matrices whose last dimension is the input's. [groups, out, inputs]
        bias: Column of the constant input, if there is one. [groups, out]
    """
    inputs = matrix.shape[-1]
    coefficients = torch.matmul(matrix, basis[:, :inputs])
    if bias is not None:
        coefficients += bias.unsqueeze(-1) * basis[:, inputs:]
    return coefficients


def _orthonormalize(columns: Tensor) -> Tensor:
    """Return orthonormal columns, of which each spans with its predecessors what it did before; zero columns stay."""
    q, r = torch.linalg.qr(columns)
    signs = torch.where(r.diagonal(dim1=1, dim2=2) < 0, -1.0, 1.0)  # QR leaves them open; keep those of the columns
    orthonormal: Tensor = q * (signs * columns.any(dim=1)).unsqueeze(1)
    return orthonormal


def _orthogonalize(M: Tensor, directions: Tensor) -> Tensor:
    """Return orthonormal directions that are orthogonal to M."""
    if M.shape[2] == 0:
        return directions
    for _ in range(2):  # twice is enough: the second pass removes the rounding of the first
        directions = directions - M @ (M.mT @ directions)
    return _orthonormalize(directions)


def _pack(basis: Tensor, lambdas: Tensor, kept: Tensor, dimension: int) -> Subspace:
    """Return a subspace in float32 of the kept columns in their order, at most ``dimension`` of them."""
    rank = kept.sum(-1).clamp(max=dimension)
    order = torch.argsort(kept.int(), dim=-1, descending=True, stable=True)[:, : int(rank.max())]
    front = torch.arange(order.shape[1], device=basis.device) < rank.unsqueeze(-1)
    basis = basis.gather(2, order.unsqueeze(1).expand(-1, basis.shape[1], -1)) * front.unsqueeze(1)
    lambdas = lambdas.gather(1, order).where(front, 0.0)
    return Subspace(basis.float().contiguous(), lambdas.float().clamp(0.0, 1.0), rank)
