"""Heads of earlier tasks follow the features that a later task has moved.

Where features drift, a head that stays reads them wrongly, though most of what it needs is still there. No example of
its task is at hand; but what the drift does to its answers can be seen on the examples of the new task. So a head is
changed by least squares to answer to these what it answered before. Semantic drift compensation (Yu et al., CVPR
2020) moves class means in this way, learnable drift compensation (Gomez-Villa et al., ECCV 2024) features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sgp.projection.distributed import Team
from sgp.projection.representation import no_trace

# Of the mean energy of a feature: what keeps heads where they are along directions that the new task hardly has.
RIDGE = 0.1


def answers_of(heads: Sequence[nn.Linear], features: Tensor) -> Tensor:
    """What heads answer to features [n, d], side by side [n, classes of all]."""
    return torch.cat([head(features) for head in heads], dim=1)


@torch.no_grad()
def refit(heads: Sequence[nn.Linear], wanted: Iterable[tuple[Tensor, Tensor]], team: Team | None = None) -> None:
    """Change heads so that they give the answers that are wanted, as far as they can and a ridge lets them.

    With X the features [n, d] and A the answers, the weights W of all heads become W + D^T with

        D = (X^T X + r I)^-1 X^T (A - X W^T)

    Args:
        heads: on the same features.
        wanted: batches of features, and the answers to them as `answers_of` has them.
        team: whose processes see a part of them each and end with the same heads; without it this one is alone.
    """
    team = team or Team(distributed=False)
    gram, product = (team.summed(part) for part in team.agreed(partial(_products, heads, wanted)))
    if not gram.any():
        raise ValueError("the batches gave no input that a head could be fitted to")
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    change = team.of_first(torch.linalg.solve(gram, product)).T
    for head, own in zip(heads, torch.split(change, [head.out_features for head in heads]), strict=True):
        head.weight.add_(own[:, : head.in_features])
        if head.bias is not None:
            head.bias.add_(own[:, -1])


def _products(heads: Sequence[nn.Linear], wanted: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """X^T X and X^T (A - X W^T), in float64. A bias is the weight of a feature that is always 1."""
    d, with_bias = heads[0].in_features, any(head.bias is not None for head in heads)
    gram = heads[0].weight.new_zeros(d + with_bias, d + with_bias, dtype=torch.float64)
    product = gram.new_zeros(d + with_bias, sum(head.out_features for head in heads))
    for features, answers in wanted:
        rows = nn.functional.pad(features, (0, 1), value=1.0) if with_bias else features
        gram += rows.T @ rows
        product += rows.T @ (answers - answers_of(heads, features))
    return gram, product


def realign(
    model: nn.Module,
    heads: Sequence[nn.Linear],
    batches: Iterable[Any],
    features: Callable[[Any], Tensor],
    reference: Mapping[str, Tensor],
    team: Team,
) -> None:
    """Fit heads to the answers that they gave to batches with a model's weights of another time.

    Args:
        model: that the heads are of.
        heads: on the same features.
        batches: of any kind.
        features: what the heads read of one, [..., d].
        reference: the weights of that time by name; those that it lacks stay as they are.
        team: whose processes have other batches.
    """
    # In memory as the weights are, so that they can stand in for them.
    then = {
        name: torch.empty_like(tensor).copy_(reference[name])
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if name in reference
    }

    def wanted() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in batches:
            with _swapped(model, then):
                answers = answers_of(heads, _rows(features(batch), heads))
            yield _rows(features(batch), heads), answers

    with no_trace(model, batches):
        refit(heads, wanted(), team)


@contextmanager
def _swapped(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Other values in a model's parameters and buffers for a while, without copying any."""
    own = dict((*model.named_parameters(), *model.named_buffers()))
    kept = {name: own[name].data for name in tensors}
    try:
        for name, tensor in tensors.items():
            own[name].data = tensor
        yield
    finally:
        for name, tensor in kept.items():
            own[name].data = tensor


def _rows(features: Tensor, heads: Sequence[nn.Linear]) -> Tensor:
    """Features as rows [n, d]."""
    if not isinstance(features, Tensor) or features.dim() < 2 or features.shape[-1] != heads[0].in_features:
        found = f"shape {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(f"features must give what the heads read, [n, {heads[0].in_features}]; got {found}")
    # An autocast pass gives them in less than the heads compute with outside of it.
    return features.flatten(0, -2).to(heads[0].weight.dtype)
