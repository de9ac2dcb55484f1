"""Embeddings: the input of a lookup is a one-hot row, so its Gram matrix is diagonal and holds the count of each token.

The eigenvectors of a diagonal matrix are the axes, so bases are tokens, and nothing is decomposed. The singular value
of a token is the square root of its count: importances grow with that root, and rare tokens stay nearly free.
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
    """Number of occurrences of each token: all that the bases and importances of an embedding depend on.

    Args:
        dimension: Number of tokens of the vocabulary.
    """

    def __init__(self, dimension: int) -> None:
        super().__init__(1, dimension, precise=True)
        self.counts = torch.zeros(dimension, dtype=torch.int64, device="cpu")

    @classmethod
    def from_counts(cls, counts: Tensor, count: int) -> TokenCounts:
        """Return an object with counts that were made elsewhere, [tokens]."""
        gram = cls(len(counts))
        gram.counts, gram.count = counts, count
        return gram

    @property
    def device(self) -> torch.device:
        return self.counts.device

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes

    def add(self, rows: Tensor) -> None:
        """Count indices: [n]."""
        rows = place_rows(rows)
        self.counts = self.counts.to(rows.device) + torch.bincount(rows, minlength=self.dimension)
        self.count += len(rows)

    def compute_energy(self) -> Tensor:
        return self.counts.sum().double().unsqueeze(0)

    def compute_energy_through(self, matrix: Tensor) -> Tensor:
        return (matrix.to(self.device).double().square().sum(1) * self.counts).sum(-1)


@dataclass(frozen=True)
class TokenSubspace(Bases):
    """Bases that are single tokens.

    Attributes:
        tokens: Tokens that are bases. [k] int64
        importance: Importances lambda in [0, 1]. [1, k]
        size: Number of tokens of the vocabulary. [] int64
    """

    tokens: Tensor
    importance: Tensor
    size: Tensor

    @staticmethod
    def empty(size: int) -> TokenSubspace:
        """Return a subspace without bases."""
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
        """Tokens of importance 1, whose vectors do not move. [n] Cached, because counting them synchronizes."""
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
        """Return the bases for a vocabulary that has grown: its new tokens are free."""
        return self if dimension <= self.dimension else replace(self, size=torch.tensor(dimension, device="cpu"))

    def select_tokens(self, start: int, stop: int) -> TokenSubspace:
        """Return the subspace of the tokens from ``start`` to before ``stop``, renumbered from 0."""
        here = (self.tokens >= start) & (self.tokens < stop)
        return TokenSubspace(
            self.tokens[here] - start, self.importance[:, here], torch.tensor(stop - start, device="cpu")
        )

    def state_dict(self) -> dict[str, Tensor]:
        return {"tokens": self.tokens, "importance": self.importance, "size": self.size}

    def grow(
        self,
        gram: InputGram,
        *,
        threshold: float,
        alpha: float,
        numerics: Numerics | None = None,
        choose: Choice | None = None,
    ) -> TokenSubspace:
        assert isinstance(gram, TokenCounts)
        if gram.count == 0:
            return self
        counts = gram.counts.double().unsqueeze(0)
        tokens = self.tokens.to(counts.device)
        surrogate = counts[:, tokens]
        # Equally frequent tokens keep their order, so that the result is the same on every machine.
        energies, order = counts.index_fill(1, tokens, 0.0).sort(descending=True, stable=True)
        total = counts.sum(-1)
        new = choose(surrogate, energies, total, threshold) if choose else find_minimal_rank(energies, total, threshold)
        if numerics is not None and numerics.first_rank == "one-less" and not len(tokens):
            new = new - 1
        added = min(max(0, int(new)), int((energies > 0).sum()))
        captured = torch.cat([surrogate, energies[:, :added]], dim=-1)
        gram.captured = float(captured.sum() / total)
        task = compute_importance(captured.sqrt(), alpha)
        old = self.importance.to(task.device).to(task)
        lambdas = torch.cat([accumulate_importance(old, task[:, : len(tokens)]), task[:, len(tokens) :]], dim=-1)
        return TokenSubspace(torch.cat([tokens, order[0, :added]]), lambdas.float(), self.size)

    def subtract_projection_(
        self, source: Tensor, source_bias: Tensor | None, target: Tensor, target_bias: Tensor | None
    ) -> None:
        blocked = source.index_select(2, self.tokens) * self.importance.unsqueeze(1)
        target.index_add_(2, self.tokens, blocked, alpha=-1)

    def compute_captured_energy(self, gram: InputGram) -> Tensor:
        assert isinstance(gram, TokenCounts)
        return gram.counts[self.tokens.to(gram.counts.device)].sum().double().unsqueeze(0)

    def compute_blocked_coefficients(self, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        is_blocked = (self.importance == 1).to(matrix.device)
        return matrix.index_select(2, self.tokens.to(matrix.device)) * is_blocked.unsqueeze(1)


def load_bases(state: Mapping[str, Tensor]) -> Bases:
    """Return the bases that a ``state_dict`` describes."""
    if "tokens" in state:
        return TokenSubspace(state["tokens"], state["importance"], state["size"])
    return Subspace(state["basis"], state["importance"], state["rank"], state.get("scale"))
