"""One subspace: bases and their importances. Every equation of the paper's method section stands here, once.

Orientation: the paper writes representations and gradients as columns (d x n, d x out). Rows are used here,
as PyTorch stores them, so the paper's ``M^T R`` is ``rows @ M``. All tensors have a leading ``groups``
dimension: the groups of a convolution have inputs, and so subspaces, of their own and are computed side by
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
from torch.nn import functional as F

from sgp.projection.gram import InputGram
from sgp.projection.precision import to_float64

ROUNDING = 2.0**-52
# Bases are stored in float32. What they leave of an input they should hold wholly is rounding of that size,
# squared because energies are compared, and no new direction.
STORED_ROUNDING = 2.0**-46
# The same for a whole basis of fewer bits: the square of its relative error.
COMPRESSED_ROUNDING = {torch.bfloat16: 2.0**-16, torch.int8: 2.0**-12}

# In what form bases are kept. A step computes with what is kept, so a saved memory is the live one to the bit.
Store = Literal["float32", "bfloat16", "int8"]
STORES = ("float32", "bfloat16", "int8")

# How many directions a task adds to the bases [groups], from the energies of the old bases [groups, k], those of what
# they leave over, strongest first [groups, r], the total [groups] and the threshold.
Choice = Callable[[Tensor, Tensor, Tensor, float], Tensor]
# So many of the directions that old bases leave over, strongest first: [groups, d, width].
Strongest = Callable[[int], Tensor]


@dataclass(frozen=True)
class Numerics:
    """Where the published code and the paper's text differ inside an update.

    Attributes:
        first_rank: ``"minimal"`` is the smallest rank that satisfies Eq. 1; ``"one-less"`` is that minus one,
            as in the published image experiments.
        truncation: what happens to new bases that would exceed the dimension. ``"before"``: they are dropped
            before importances are computed; ``"after"``: they take part in the normalisation of Eq. 2 and are
            dropped then.
        orthogonalise: make new bases orthogonal to the old ones again, to rounding. The published code does
            not.
    """

    first_rank: Literal["minimal", "one-less"] = "minimal"
    truncation: Literal["before", "after"] = "before"
    orthogonalise: bool = True


def find_minimal_rank(energies: Tensor, total: Tensor, threshold: float) -> Tensor:
    """Smallest k whose k strongest directions satisfy Eq. 1 (first task) and Eq. 5 (later ones).

    Both ask that what is *not* captured be at most (1 - threshold) of the total. Counting what is discarded,
    from the weakest up, stays exact at thresholds near 1, where counting up to the threshold adds noise
    directions.

    Args:
        energies: squared singular values of what the old bases leave over, descending. [groups, r]
        total: |R|_F^2. [groups]
        threshold: the paper's epsilon_th, in (0, 1].

    Returns:
        [groups] int64.
    """
    discarded = energies.flip(-1).cumsum(-1).flip(-1)  # discarded[k] is what remains if k directions are kept
    dimension = energies.shape[-1]
    allowed = ((1.0 - threshold) + dimension * ROUNDING) * total
    return (discarded > allowed.unsqueeze(-1)).sum(-1)


def compute_importance(sigma: Tensor, alpha: float) -> Tensor:
    """Eq. 2: importance of each basis for one task from its singular value. [groups, k] -> [groups, k].

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
    """Eq. 10: importance over all tasks so far, at most 1."""
    return (old + new).clamp(max=1.0)


class Projector(ABC):
    """What a step needs of bases and importances.

    Attributes:
        importance: lambda, in [0, 1]; zero beyond the rank. [groups, k]
    """

    importance: Tensor

    @abstractmethod
    def subtract_projection_(
        self, source: Tensor, source_bias: Tensor | None, target: Tensor, target_bias: Tensor | None
    ) -> None:
        """Eq. 3, in place: subtract from the target what the bases block of the source, source M Lambda M^T.

        With the source as its own target this projects a gradient; with a weight change as source and the
        weight as target it projects what an optimizer applied.

        Args:
            source: matrices that meet the input on their last side. [groups, out, inputs]
            source_bias: the part that meets the constant input, if there is one. [groups, out]
            target: as source.
            target_bias: as source_bias.
        """

    @abstractmethod
    def compute_blocked_share(self, matrix: Tensor, bias: Tensor | None = None) -> float:
        """The share of matrices that lies along bases of importance 1.

        Args:
            matrix: meets the input on its last side. [groups, out, inputs]
            bias: meets the constant input, if there is one. [groups, out]
        """


class Bases(Projector):
    """What bases and importances of a layer's inputs can do, whatever the bases are kept as.

    Attributes:
        importance: lambda, in [0, 1]; zero beyond the rank. [groups, k]
        rank: number of bases of each group. [groups] int64
    """

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
        """How many bases the group with the most has."""
        return self.importance.shape[1]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to protect."""
        return self.width == 0

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored."""
        return sum(tensor.nbytes for tensor in self.state_dict().values())

    @property
    def blocked(self) -> int:
        """How many bases have importance 1, so that nothing moves along them."""
        return int((self.importance == 1).sum())

    @property
    def free(self) -> float:
        """Free capacity: one minus the mean importance over all dimensions."""
        return 1.0 - float(to_float64(self.importance).sum()) / (self.groups * self.dimension)

    @property
    def is_compressed(self) -> bool:
        """Whether the bases are kept in fewer bits than a step computes with."""
        return False

    @property
    @abstractmethod
    def is_consistent(self) -> bool:
        """Whether there are as many importances as bases, as there are not in a damaged file."""

    @abstractmethod
    def to(self, device: torch.device, dtype: torch.dtype) -> Bases:
        """The same where and as it is needed; itself if nothing changes."""

    @abstractmethod
    def compress(self, store: Store) -> Bases:
        """The same bases, rounded to what they are kept as. What was rounded before stays as it is."""

    @abstractmethod
    def with_importance(self, importance: Tensor) -> Bases:
        """The same bases with other importances."""

    def resize(self, dimension: int) -> Bases:
        """The same for inputs of another dimension, where bases can follow; itself where they cannot."""
        return self

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """All of it as tensors."""

    @abstractmethod
    def grow(
        self,
        statistic: InputGram,
        *,
        threshold: float,
        alpha: float,
        numerics: Numerics | None = None,
        choose: Choice | None = None,
    ) -> Bases:
        """The bases after one more task (Algorithm 1, the loop over layers).

        Args:
            statistic: the task's representation.
            threshold: epsilon_th of Eq. 1 and 5.
            alpha: the scale coefficient of Eq. 2; ``math.inf`` is GPM.
            numerics: where the published code differs.
            choose: how many directions to add, if not the fewest that reach the threshold beside all old bases.
        """

    @abstractmethod
    def compute_captured_energy(self, statistic: InputGram) -> Tensor:
        """The energy of a representation that lies in the bases, of each group. [groups]"""

    @abstractmethod
    def compute_blocked_coefficients(self, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """What matrices do along each basis of importance 1, where nothing may move. [groups, out, k]

        Args:
            matrix: meets the input on its last side. [groups, out, inputs]
            bias: meets the constant input, if there is one. [groups, out]
        """

    def compute_blocked_share(self, matrix: Tensor, bias: Tensor | None = None) -> float:
        blocked = self.compute_blocked_coefficients(matrix, bias)
        return float(blocked.norm()) / max(float(matrix.norm()), torch.finfo(matrix.dtype).tiny)


@dataclass(frozen=True)
class Subspace(Bases):
    """Bases M and accumulated importances lambda of one layer's inputs. Immutable: ``grow`` gives a new one.

    Attributes:
        basis: orthonormal columns; where groups differ in rank, the rest is zero columns. [groups, d, k]
        importance: lambda, in [0, 1]; zero beyond the rank. [groups, k]
        rank: number of bases of each group. [groups] int64
        scale: of each column, where the columns are kept as int8. [groups, k]
        lean: whether a dense projector would cost more to make than it saves, since it is used once.
    """

    basis: Tensor
    importance: Tensor
    rank: Tensor
    scale: Tensor | None = None
    lean: bool = False

    @staticmethod
    def empty(groups: int, dimension: int) -> Subspace:
        """A subspace without bases."""
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
        # The device first: the one that they come from may not have the type.
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
            # A column of length 1 again: what lies along it is then taken away in full.
            scale = (1 / norm.where(norm > 0, 1.0)).where(norm > 0, 0.0)
            return Subspace(whole.to(torch.int8), self.importance, self.rank, scale)
        dtype = torch.bfloat16 if store == "bfloat16" else torch.float32
        return Subspace(basis.to(dtype), self.importance, self.rank)

    def with_importance(self, importance: Tensor) -> Subspace:
        return replace(self, importance=importance)

    def select_groups(self, groups: slice) -> Subspace:
        """Only some of the groups."""
        scale = None if self.scale is None else self.scale[groups]
        return Subspace(self.basis[groups], self.importance[groups], self.rank[groups], scale, self.lean)

    def compute_captured_energy(self, statistic: InputGram) -> Tensor:
        return statistic.compute_energy_through(self.to(statistic.device, torch.float64).basis.mT)

    def compute_blocked_coefficients(self, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        basis = self.to(matrix.device, matrix.dtype).basis
        is_blocked = (self.importance == 1).to(matrix.device)
        return compute_coefficients(basis * is_blocked.unsqueeze(1), matrix, bias)

    def state_dict(self) -> dict[str, Tensor]:
        state = {"basis": self.basis, "importance": self.importance, "rank": self.rank}
        return state if self.scale is None else state | {"scale": self.scale}

    def grow(
        self,
        statistic: InputGram,
        *,
        threshold: float,
        alpha: float,
        numerics: Numerics | None = None,
        choose: Choice | None = None,
    ) -> Subspace:
        # One decomposition: the second SVD that the paper takes for the importances of the old bases is not needed,
        # since Eq. 6 and 7, written out, say that the surrogate singular value of basis m_i is |m_i^T R|.
        if statistic.count == 0:
            return self
        numerics = numerics or Numerics()
        kept_basis = self.to(statistic.device, torch.float64).basis
        M = _orthonormal(kept_basis) if self.is_compressed else kept_basis
        rows = statistic.get_rows()
        if rows is not None:
            total, surrogate, energies, strongest = _from_rows(rows, M)
        else:
            gram = statistic.get_gram()
            total, surrogate, energies, strongest = _from_gram(gram, M, self.rank)
        old_rank = self.rank.to(M.device)

        if choose is None:
            new = find_minimal_rank(energies, total, threshold)
        else:
            new = choose(surrogate, energies, total, threshold)
        if numerics.first_rank == "one-less":
            new = torch.where(old_rank == 0, (new - 1).clamp(min=0), new)
        largest = torch.cat([surrogate, energies], dim=-1).amax(-1)
        stored_rounding = COMPRESSED_ROUNDING.get(self.basis.dtype, self.dimension * STORED_ROUNDING)
        floor = torch.where(old_rank == 0, self.dimension * ROUNDING, stored_rounding) * largest
        new = torch.minimum(new, (energies > floor.unsqueeze(-1)).sum(-1))
        if numerics.truncation == "before":
            new = torch.minimum(new, self.dimension - old_rank)
        width = int(new.max())
        directions = strongest(width)
        if numerics.orthogonalise:
            directions = _orthogonal_to(M, directions)

        # Eq. 8: surrogate singular values of the old bases, then singular values of the new ones.
        kept_new = torch.arange(width, device=M.device) < new.unsqueeze(-1)
        kept_old = torch.arange(M.shape[2], device=M.device) < old_rank.unsqueeze(-1)
        sigma_new = energies[..., :width].sqrt().where(kept_new, 0.0)
        sigma = torch.cat([surrogate.sqrt().where(kept_old, 0.0), sigma_new], dim=-1)
        task = compute_importance(sigma, alpha)
        k = M.shape[2]
        lambda_old = accumulate_importance(self.importance.to(task.device).to(task), task[..., :k])
        kept = torch.cat([kept_old, kept_new], dim=-1)
        basis = torch.cat([kept_basis, directions], dim=-1)
        lambdas = torch.cat([lambda_old, task[..., k:]], dim=-1)
        return _packed(basis, lambdas, kept, self.dimension)

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
        """What :meth:`subtract_projection_` would subtract, as tensors of their own through which gradients flow.

        Args:
            source: matrices that meet the input on their last side. [groups, out, inputs]
            source_bias: the part that meets the constant input, if the subspace has one. [groups, out]
        """
        inputs = source.shape[-1]
        coefficients = compute_coefficients(self.basis, source, source_bias) * self.importance.unsqueeze(1)
        if source_bias is None:
            return coefficients @ self.basis[:, :inputs].mT, None
        part = coefficients @ self.basis.mT
        return part[..., :inputs], part[..., inputs]

    @property
    def _prefers_dense(self) -> bool:
        """Two products with M cost more than one with M Lambda M^T once k exceeds half the dimension."""
        return 2 * self.basis.shape[2] > self.dimension and not self.lean

    @cached_property
    def _projector(self) -> Tensor:
        """M Lambda M^T [groups, d, d]."""
        return (self.basis * self.importance.unsqueeze(1)) @ self.basis.mT


def compute_coefficients(basis: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """What matrices do along each basis: [groups, out, k].

    Args:
        basis: [groups, d, k]
        matrix: meets the input on its last side. [groups, out, inputs]
        bias: meets the constant input, if there is one. [groups, out]
    """
    inputs = matrix.shape[-1]
    coefficients = torch.matmul(matrix, basis[:, :inputs])
    if bias is not None:
        coefficients += bias.unsqueeze(-1) * basis[:, inputs:]
    return coefficients


def _from_rows(rows: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor, Strongest]:
    """Energies: total, of the old bases, of the residual's directions; those directions. From n < d rows."""
    coefficients = rows @ M
    residual = rows - coefficients @ M.mT  # Eq. 4
    left, sigma, _ = torch.linalg.svd(residual.mT, full_matrices=False)
    return rows.square().sum((1, 2)), coefficients.square().sum(1), sigma.square(), lambda width: left[..., :width]


def _from_gram(gram: Tensor, M: Tensor, rank: Tensor) -> tuple[Tensor, Tensor, Tensor, Strongest]:
    """The same from G = R R^T, of which the residual has (I - M M^T) G (I - M M^T).

    That matrix is zero along M, so it is decomposed in coordinates of what M leaves over: the more bases there are, the
    less is to be done. The coordinates are those of the reflections Q of M = Q U, which are applied and never written
    out: the columns of Q after the rank are orthonormal and span what the bases do not.
    """
    total = gram.diagonal(dim1=1, dim2=2).sum(-1)
    k, least = M.shape[2], int(rank.min())
    if k == 0:
        energies, directions = torch.linalg.eigh(gram)
        surrogate = total.new_zeros(len(total), 0)
        return total, surrogate, energies.clamp(min=0).flip(-1), lambda width: _last(directions, width)
    reflections = torch.geqrf(M)
    turned = torch.ormqr(*reflections, gram, transpose=True)  # Q^T G
    surrogate = (reflections[0][:, :k].triu().mT @ turned[:, :k] * M.mT).sum(-1).clamp(min=0)  # M^T G = U^T Q^T G
    # Where groups differ in rank, M has zero columns, which make no reflection: their columns of Q are free too.
    is_free = (torch.arange(least, M.shape[1], device=M.device) >= rank.to(M.device).unsqueeze(-1)).to(M)
    free_gram = torch.ormqr(*reflections, turned[:, least:], left=False)[..., least:]
    energies, coordinates = torch.linalg.eigh(free_gram * is_free.unsqueeze(1) * is_free.unsqueeze(2))

    def strongest(width: int) -> Tensor:
        found = _last(coordinates, width) * is_free.unsqueeze(2)
        return torch.ormqr(*reflections, F.pad(found, (0, 0, least, 0)))

    return total, surrogate, energies.clamp(min=0).flip(-1), strongest


def _last(columns: Tensor, width: int) -> Tensor:
    """So many columns from the last on."""
    return columns[..., columns.shape[2] - width :].flip(-1)


def _orthonormal(basis: Tensor) -> Tensor:
    """Bases that rounding has moved a little, orthonormal again; zero columns stay."""
    if basis.shape[2] == 0:
        return basis
    q, r = torch.linalg.qr(basis)
    signs = torch.where(r.diagonal(dim1=1, dim2=2) < 0, -1.0, 1.0)
    kept: Tensor = q * (signs * basis.any(dim=1)).unsqueeze(1)
    return kept


def _orthogonal_to(M: Tensor, directions: Tensor) -> Tensor:
    """Orthonormal directions, orthogonal to M; each spans with its predecessors what it did before."""
    if M.shape[2] == 0 or directions.shape[2] == 0:
        return directions
    for _ in range(2):  # twice is enough: the second pass removes the rounding of the first
        directions = directions - M @ (M.mT @ directions)
    q, r = torch.linalg.qr(directions)
    diagonal: Tensor = r.diagonal(dim1=1, dim2=2)
    signs = torch.where(diagonal < 0, -1.0, 1.0)  # QR leaves them open; keep those of the decomposition
    kept: Tensor = q * signs.unsqueeze(1)
    return kept


def _packed(basis: Tensor, lambdas: Tensor, kept: Tensor, dimension: int) -> Subspace:
    """Kept columns moved to the front in order, at most ``dimension`` of them, stored in float32."""
    rank = kept.sum(-1).clamp(max=dimension)
    order = torch.argsort(kept.int(), dim=-1, descending=True, stable=True)[:, : int(rank.max())]
    front = torch.arange(order.shape[1], device=basis.device) < rank.unsqueeze(-1)
    basis = basis.gather(2, order.unsqueeze(1).expand(-1, basis.shape[1], -1)) * front.unsqueeze(1)
    lambdas = lambdas.gather(1, order).where(front, 0.0)
    return Subspace(basis.float().contiguous(), lambdas.float().clamp(0.0, 1.0), rank)
