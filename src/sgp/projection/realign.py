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

from sgp.projection.check import lengthened
from sgp.projection.collect import evaluation_pass
from sgp.projection.distributed import ProcessGroup

# Of the mean energy of a feature: what keeps heads where they are along directions that the new task hardly has.
RIDGE = 0.1
# So many of them are multiplied at once, or more.
ROWS = 1024


def answers_of(heads: Sequence[nn.Linear], features: Tensor) -> Tensor:
    """What heads answer to features [n, d], side by side [n, classes of all]."""
    return torch.cat([head(features) for head in heads], dim=1)


@torch.no_grad()
def refit(
    heads: Sequence[nn.Linear], wanted: Iterable[tuple[Tensor, Tensor]], team: ProcessGroup | None = None
) -> None:
    """Change heads so that they give the answers that are wanted, as far as they can and a ridge lets them.

    With X the features [n, d] and A the answers, the weights W of all heads become W + D^T with

        D = (X^T X + r I)^-1 X^T (A - X W^T)

    Args:
        heads: on the same features, each with weights of its own.
        wanted: batches of features, and the answers to them as `answers_of` has them.
        team: whose processes see a part of them each and end with the same heads; without it this one is alone.

    Raises:
        ValueError: there are no features, or only zeros.
        FloatingPointError: one of them, or an answer, is no number. Heads are as before in either case.
    """
    team = team or ProcessGroup(distributed=False)
    gram, product = (team.sum_over_ranks(part) for part in team.run_together(partial(_products, heads, wanted)))
    d = len(gram) - 1
    if not (gram.isfinite().all() and product.isfinite().all()):
        raise FloatingPointError(
            "some of the features or answers are not numbers, or too large: heads stay as they are"
        )
    if not gram.diagonal()[:d].any():
        raise ValueError("the batches gave no features, or only zeros: there is nothing that a head could be fitted to")
    # So scaled, a fit is the same for features of any size.
    gram.diagonal()[:d] += RIDGE * gram.diagonal()[:d].mean()
    gram[d, d] *= 1 + RIDGE
    change = torch.zeros_like(product)
    columns = torch.split(torch.arange(product.shape[1]), [head.out_features for head in heads])
    for used in (d, d + 1):  # without a bias, and with one
        own = [part for head, part in zip(heads, columns, strict=True) if used == d + (head.bias is not None)]
        if own:
            place = torch.cat(own).to(product.device)
            change[:used, place] = torch.linalg.solve(gram[:used, :used], product[:used, place])
    change = team.broadcast_first(change)
    for head, part in zip(heads, columns, strict=True):
        head.weight.add_(change[:d, part].T)
        if head.bias is not None:
            head.bias.add_(change[d, part])


def _products(heads: Sequence[nn.Linear], wanted: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """X^T X and X^T (A - X W^T), summed in float64. The last of the features is always 1: a bias is its weight."""
    d = heads[0].in_features
    gram = heads[0].weight.new_zeros(d + 1, d + 1, dtype=torch.float64)
    product = gram.new_zeros(d + 1, sum(head.out_features for head in heads))
    for features, answers in _in_lots(wanted):
        error = answers - answers_of(heads, features)
        # Half precision would overflow, and autocast would compute in it.
        exact = torch.promote_types(features.dtype, torch.float32)
        with torch.autocast(features.device.type, enabled=False):
            rows = nn.functional.pad(features.to(exact), (0, 1), value=1.0)
            gram += rows.T @ rows
            product += rows.T @ error.to(exact)
    return gram, product


def _in_lots(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches joined to lots of some size: adding a product up costs as much for few rows as for many."""
    features: list[Tensor] = []
    answers: list[Tensor] = []
    for batch, wanted in pairs:
        features.append(batch)
        answers.append(wanted)
        if sum(map(len, features)) >= ROWS:
            yield torch.cat(features), torch.cat(answers)
            features, answers = [], []
    if features:
        yield torch.cat(features), torch.cat(answers)


def realign(
    model: nn.Module,
    heads: Mapping[str, nn.Linear],
    batches: Iterable[Any],
    features: Callable[[Any], Tensor],
    reference: Mapping[str, Tensor],
    team: ProcessGroup,
) -> None:
    """Fit heads to the answers that they gave to batches with a model's weights of another time.

    Args:
        model: that the heads are of.
        heads: on the same features, by name in the model.
        batches: of any kind.
        features: what the heads read of one, [..., d].
        reference: the weights of that time by name; those that it lacks stay as they are.
        team: whose processes have other batches.
    """
    now = dict((*model.named_parameters(), *model.named_buffers()))
    # In memory as the weights are, so that they can stand in for them.
    then = {
        name: torch.empty_like(tensor).copy_(lengthened(reference[name], tensor))
        for name, tensor in now.items()
        if name in reference
    }
    if all(torch.equal(now[name], tensor) for name, tensor in then.items()):
        raise RuntimeError("nothing has changed since the last update: call realign before the update of the new task")
    for name, head in heads.items():
        parts = [f"{name}.{part}" for part, _ in head.named_parameters()]
        if not all(part in then and torch.equal(now[part], then[part]) for part in parts):
            raise ValueError(f"{name!r} has changed since the last update, so it is no head of an earlier task")
    own = list(heads.values())

    def wanted() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in batches:
            with _swapped(now, then):
                answers = answers_of(own, _rows(features(batch), own))
            yield _rows(features(batch), own), answers

    with evaluation_pass(model, batches):
        refit(own, wanted(), team)


def heads_of(model: nn.Module, heads: Iterable[nn.Module]) -> dict[str, nn.Linear]:
    """Heads by their names in a model, each once.

    Raises:
        TypeError: one is no linear layer of the model whose weight can be changed.
        ValueError: two have the same weight, or they read other features.
    """
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, nn.Linear] = {}
    for head in heads:
        if not isinstance(head, nn.Linear):
            raise TypeError(f"heads must be nn.Linear layers, got {type(head).__name__}")
        if head not in names:
            raise TypeError(
                f"the model has no such head, {head}: make the memory of a module that holds body and heads, with the "
                "heads in exclude="
            )
        if "weight" not in head._parameters:
            raise TypeError(f"the weight of {names[head]!r} is computed from others: remove its parametrization first")
        found[names[head]] = head
    weights = {id(head.weight): name for name, head in found.items()}
    for name, head in found.items():
        if weights[id(head.weight)] != name:
            raise ValueError(f"{name!r} and {weights[id(head.weight)]!r} have one weight: give one of them")
    widths = sorted({head.in_features for head in found.values()})
    if len(widths) > 1:
        raise ValueError(f"heads must read the same features, got some of {' and '.join(map(str, widths))}")
    return found


@contextmanager
def _swapped(now: Mapping[str, Tensor], then: Mapping[str, Tensor]) -> Iterator[None]:
    """Other values in a model's parameters and buffers for a while, without copying any."""
    kept = {name: now[name].data for name in then}
    try:
        for name, tensor in then.items():
            now[name].data = tensor
        torch.clear_autocast_cache()  # it knows weights by what holds them
        yield
    finally:
        for name, tensor in kept.items():
            now[name].data = tensor
        torch.clear_autocast_cache()


def _rows(features: Tensor, heads: Sequence[nn.Linear]) -> Tensor:
    """Features as rows [n, d]."""
    if not isinstance(features, Tensor) or features.dim() < 2 or features.shape[-1] != heads[0].in_features:
        found = f"shape {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(f"features must give what the heads read, [n, {heads[0].in_features}]; got {found}")
    # An autocast pass gives them in less than the heads compute with outside of it.
    return features.flatten(0, -2).to(heads[0].weight.dtype)
