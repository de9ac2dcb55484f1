"""Embeddings: the input of a lookup is a one-hot row, so its Gram matrix is the diagonal of how often each token came.

The eigenvectors of a diagonal matrix are the axes, so bases are tokens, and nothing is decomposed. The singular value
of a token is the root of its count: importances go with that root, and tokens that hardly came stay nearly free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from sgp.projection.gram import InputGram, place_rows
from sgp.projection.subspace import (
    Bases,
    Choice,
    Numerics,
    Store,
    Subspace,
    accumulate_importance,
    compute_importance,
    find_minimal_rank,
)


class TokenCounts(InputGram):
    """How often each token came: all that bases and importances need to know of indices.

    Args:
        dimension: how many tokens there are.
    """

    def __init__(self, dimension: int) -> None:
        super().__init__(1, dimension, precise=True)
        self.counts = torch.zeros(dimension, dtype=torch.int64, device="cpu")

    @classmethod
    def from_counts(cls, counts: Tensor, count: int) -> TokenCounts:
        """Counts that were made elsewhere. [tokens]"""
        statistic = cls(len(counts))
        statistic.counts, statistic.count = counts, count
        return statistic

    @property
    def device(self) -> torch.device:
        return self.counts.device

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes

    def add(self, rows: Tensor) -> None:
        """Take in indices: [n]."""
        rows = place_rows(rows)
        self.counts = self.counts.to(rows.device) + torch.bincount(rows, minlength=self.dimension)
        self.count += len(rows)

    def compute_energy(self) -> Tensor:
        return self.counts.sum().double().unsqueeze(0)

    def compute_energy_through(self, matrix: Tensor) -> Tensor:
        return (matrix.to(self.device).double().square().sum(1) * self.counts).sum(-1)

    def clone(self) -> TokenCounts:
        return TokenCounts.from_counts(self.counts, self.count)


@dataclass(frozen=True)
class TokenSubspace(Bases):
    """Bases that are single tokens.

    Attributes:
        tokens: [k] int64
        importance: lambda, in [0, 1]. [1, k]
        size: how many tokens there are. [] int64
    """

    tokens: Tensor
    importance: Tensor
    size: Tensor

    @staticmethod
    def empty(size: int) -> TokenSubspace:
        """No bases."""
        return TokenSubspace(torch.zeros(0, dtype=torch.int64), torch.zeros(1, 0), torch.tensor(size, device="cpu"))

    @property
    def groups(self) -> int:
        return 1

    @property
    def dimension(self) -> int:
        return int(self.size)

    @property
    def is_consistent(self) -> bool:
        return self.importance.shape == (1, len(self.tokens))

    @property
    def rank(self) -> Tensor:  # type: ignore[override]
        return torch.tensor([len(self.tokens)], device="cpu")

    @cached_property
    def fixed(self) -> Tensor:
        """Tokens of importance 1, whose vectors do not move at all. [n] To count them synchronizes, so that is done
        once."""
        return self.tokens[self.importance[0] == 1]

    def to(self, device: torch.device, dtype: torch.dtype) -> TokenSubspace:
        if self.importance.device == device and self.importance.dtype == dtype:
            return self
        return TokenSubspace(self.tokens.to(device), self.importance.to(device).to(dtype), self.size)

    def compress(self, store: Store) -> TokenSubspace:
        return self

    def with_importance(self, importance: Tensor) -> TokenSubspace:
        return replace(self, importance=importance)

    def resize(self, dimension: int) -> TokenSubspace:
        """A vocabulary that has grown: tokens are bases as before, and new ones are free."""
        return self if dimension <= self.dimension else replace(self, size=torch.tensor(dimension, device="cpu"))

    def select_tokens(self, start: int, stop: int) -> TokenSubspace:
        """Only the tokens from ``start`` to before ``stop``, counted from there."""
        here = (self.tokens >= start) & (self.tokens < stop)
        return TokenSubspace(
            self.tokens[here] - start, self.importance[:, here], torch.tensor(stop - start, device="cpu")
        )

    def state_dict(self) -> dict[str, Tensor]:
        return {"tokens": self.tokens, "importance": self.importance, "size": self.size}

    def grow(
        self,
        statistic: InputGram,
        *,
        threshold: float,
        alpha: float,
        numerics: Numerics | None = None,
        choose: Choice | None = None,
    ) -> TokenSubspace:
        assert isinstance(statistic, TokenCounts)
        if statistic.count == 0:
            return self
        counts = statistic.counts.double().unsqueeze(0)
        tokens = self.tokens.to(counts.device)
        surrogate = counts[:, tokens]
        # Tokens as frequent as each other come in their own order, so that it is the same everywhere.
        energies, order = counts.index_fill(1, tokens, 0.0).sort(descending=True, stable=True)
        new = (choose or _fewest)(surrogate, energies, counts.sum(-1), threshold)
        if numerics is not None and numerics.first_rank == "one-less" and not len(tokens):
            new = new - 1
        added = min(max(0, int(new)), int((energies > 0).sum()))
        task = compute_importance(torch.cat([surrogate, energies[:, :added]], dim=-1).sqrt(), alpha)
        old = self.importance.to(task.device).to(task)
        lambdas = torch.cat([accumulate_importance(old, task[:, : len(tokens)]), task[:, len(tokens) :]], dim=-1)
        return TokenSubspace(torch.cat([tokens, order[0, :added]]), lambdas.float(), self.size)

    def subtract_projection_(
        self, source: Tensor, source_bias: Tensor | None, target: Tensor, target_bias: Tensor | None
    ) -> None:
        blocked = source.index_select(2, self.tokens) * self.importance.unsqueeze(1)
        target.index_add_(2, self.tokens, blocked, alpha=-1)

    def compute_captured_energy(self, statistic: InputGram) -> Tensor:
        assert isinstance(statistic, TokenCounts)
        return statistic.counts[self.tokens.to(statistic.counts.device)].sum().double().unsqueeze(0)

    def compute_blocked_coefficients(self, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        is_blocked = (self.importance == 1).to(matrix.device)
        return matrix.index_select(2, self.tokens.to(matrix.device)) * is_blocked.unsqueeze(1)


def load_bases(state: Mapping[str, Tensor]) -> Bases:
    """What a `state_dict` of any bases is of."""
    if "tokens" in state:
        return TokenSubspace(state["tokens"], state["importance"], state["size"])
    return Subspace(state["basis"], state["importance"], state["rank"], state.get("scale"))


def _fewest(surrogate: Tensor, energies: Tensor, total: Tensor, threshold: float) -> Tensor:
    return find_minimal_rank(energies, total, threshold)
