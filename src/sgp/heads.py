"""Realign the heads of earlier tasks after a later task has moved the features that they read.

When features drift, the outputs of an earlier head become wrong, though the features still contain most of the
information that it needs. No examples of its task are available, but the effect of the drift on its outputs can be
measured on examples of the new task. So the head is fitted by least squares to give these the outputs that it gave
before. Semantic drift compensation (Yu et al., CVPR 2020) moves class means in this way, learnable drift compensation
(Gomez-Villa et al., ECCV 2024) features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sgp.projection.anchor import Anchor, extend_rows, list_tensors
from sgp.projection.batches import evaluation_pass, move_batch
from sgp.projection.check import check_reference
from sgp.projection.distributed import ProcessGroup
from sgp.projection.precision import full_precision, has_float64
from sgp.projection.sharded import find_fsdp_modules
from sgp.projection.update import check_not_single_batch

# Ridge relative to the mean energy of a feature. It keeps heads unchanged along directions that are weak in the new
# task.
RIDGE = 0.1
# Number of rows from which features are multiplied; smaller batches are joined.
ROWS = 1024


def realign(
    model: nn.Module,
    heads: nn.Linear | Iterable[nn.Linear],
    batches: Iterable[Any],
    *,
    features: Callable[[Any], Tensor],
    reference: Mapping[str, Tensor],
    distributed: bool = True,
) -> None:
    """Fit the heads of earlier tasks to the features that a task has moved.

    The heads are fitted by least squares to the outputs that they gave for the task's inputs before it was learned.
    Call this after training and before the memory's update::

        train(model, optimizer, task)
        sgp.heads.realign(
            model, model.heads[:2], task.loader,
            features=lambda batch: model.features(batch[0]), reference=memory.anchor,
        )
        memory.update(task.loader)

    The model runs in eval mode without gradients, and nothing but the heads is changed. If torch.distributed has been
    set up, every process calls this with its own shard of the data.

    Args:
        model: Model that contains the heads.
        heads: Linear layers of earlier tasks, which read the same features.
        batches: Batches of the task that was just learned.
        features: Function that returns the inputs of the heads for a batch, [..., d].
        reference: Weights of the model before the task by name: ``memory.anchor``, or a copy of its ``state_dict``.
        distributed: Whether other processes take part.

    Raises:
        ValueError: A head is protected by the memory, or has changed since the last update; the model is sharded; or
            the reference does not fit the model.
        RuntimeError: The model has not changed since the last update.
    """
    own = check_heads(model, [heads] if isinstance(heads, nn.Linear) else heads, reference)
    check_not_single_batch(batches)
    if find_fsdp_modules(model):
        raise ValueError("realign does not support sharded models: call it on a gathered copy of the model")
    if not own:
        return
    now = list_tensors(model)
    known = {name: tensor for name, tensor in now.items() if name in reference}
    check_reference(reference, dict(model.named_parameters()) | known)
    # In the memory format of the model, on which the last bits depend.
    then = {
        name: torch.empty_like(tensor).copy_(extend_rows(reference[name], tensor)) for name, tensor in known.items()
    }
    if all(torch.equal(now[name], tensor) for name, tensor in then.items()):
        raise RuntimeError("nothing has changed since the last update: call realign before the update of the new task")
    for name, head in own.items():
        parts = [f"{name}.{part}" for part, _ in head.named_parameters()]
        if not all(part in then and torch.equal(now[part], then[part]) for part in parts):
            raise ValueError(f"{name!r} has changed since the last update, so it is not a head of an earlier task")
    members = list(own.values())

    def compute_targets() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in batches:
            batch = move_batch(batch, model)
            with _swap_storage(now, then):
                outputs = compute_outputs(members, _flatten_features(features(batch), members))
            yield _flatten_features(features(batch), members), outputs

    with evaluation_pass(model, batches):
        fit_heads(members, compute_targets(), ProcessGroup(distributed))


@contextmanager
def _swap_storage(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Let tensors have other values inside the context, without copies, which would cost as much as a small batch."""
    kept = {name: tensors[name].data for name in values}
    try:
        for name, value in values.items():
            tensors[name].data = value
        torch.clear_autocast_cache()  # which identifies weights by their identity
        yield
    finally:
        for name, value in kept.items():
            tensors[name].data = value
        torch.clear_autocast_cache()


@torch.no_grad()
def fit_heads(
    heads: Sequence[nn.Linear], targets: Iterable[tuple[Tensor, Tensor]], processes: ProcessGroup | None = None
) -> None:
    """Fit heads to target outputs by ridge regression.

    With the features X [n, d] and the targets A, the weights W of all heads become W + D^T with

        D = (X^T X + r I)^-1 X^T (A - X W^T)

    Args:
        heads: Heads that read the same features and share no weights.
        targets: Batches of features with target outputs in the layout of :func:`compute_outputs`.
        processes: Processes that have some of the batches each and end with the same heads; None for this one alone.

    Raises:
        ValueError: There are no features, or only zeros. The heads have not changed then.
        FloatingPointError: A feature or a target is NaN or infinite. The heads have not changed then.
    """
    processes = processes or ProcessGroup(distributed=False)
    sums = processes.run_together(partial(_sum_products, heads, targets))
    gram, product = (processes.sum_over_ranks(part) for part in sums)
    d = len(gram) - 1
    if not (gram.isfinite().all() and product.isfinite().all()):
        raise FloatingPointError("some features or outputs are NaN, infinite or too large: the heads have not changed")
    if not gram.diagonal()[:d].any():
        raise ValueError("the batches have no features, or only zeros, so no head can be fitted to them")
    # With a relative ridge the fit does not depend on the scale of the features.
    gram.diagonal()[:d] += RIDGE * gram.diagonal()[:d].mean()
    gram[d, d] *= 1 + RIDGE
    change = torch.zeros_like(product)
    columns = torch.split(torch.arange(product.shape[1]), [head.out_features for head in heads])
    for used in (d, d + 1):  # heads without a bias, then heads with one
        own = [part for head, part in zip(heads, columns, strict=True) if used == d + (head.bias is not None)]
        if own:
            place = torch.cat(own).to(product.device)
            change[:used, place] = torch.linalg.solve(gram[:used, :used], product[:used, place])
    change = processes.broadcast_first(change)
    for head, part in zip(heads, columns, strict=True):
        own_change = change[:, part].to(head.weight.dtype).to(head.weight.device)
        head.weight.add_(own_change[:d].T)
        if head.bias is not None:
            head.bias.add_(own_change[d])


def compute_outputs(heads: Sequence[nn.Linear], features: Tensor) -> Tensor:
    """Return the concatenated outputs of heads for features [n, d], [n, classes of all heads]."""
    return torch.cat([head(features) for head in heads], dim=1)


def _sum_products(heads: Sequence[nn.Linear], targets: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return X^T X and X^T (A - X W^T) in float64, where X has a last column of ones for the bias."""
    d = heads[0].in_features
    device = heads[0].weight.device
    place = device if has_float64(device) else torch.device("cpu")
    gram = torch.zeros(d + 1, d + 1, dtype=torch.float64, device=place)
    product = gram.new_zeros(d + 1, sum(head.out_features for head in heads))
    for features, outputs in _join_batches(targets):
        error = outputs - compute_outputs(heads, features)
        # In half precision the products would overflow.
        exact = torch.promote_types(features.dtype, torch.float32)
        with full_precision(features.device):
            rows = nn.functional.pad(features.to(exact), (0, 1), value=1.0)
            gram += (rows.T @ rows).to(place)
            product += (rows.T @ error.to(exact)).to(place)
    return gram, product


def _join_batches(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield joined batches of at least ``ROWS`` rows: adding a product costs the same for few rows as for many."""
    features: list[Tensor] = []
    outputs: list[Tensor] = []
    for batch, target in pairs:
        features.append(batch)
        outputs.append(target)
        if sum(map(len, features)) >= ROWS:
            yield torch.cat(features), torch.cat(outputs)
            features, outputs = [], []
    if features:
        yield torch.cat(features), torch.cat(outputs)


def check_heads(model: nn.Module, heads: Iterable[nn.Module], reference: Mapping[str, Tensor]) -> dict[str, nn.Linear]:
    """Return heads by their names in a model, after checking that they can be realigned.

    Args:
        model: Model that contains the heads.
        heads: Heads of earlier tasks.
        reference: As in :func:`realign`; only a memory's anchor knows which heads the memory protects.

    Returns:
        The heads by name.

    Raises:
        TypeError: A head is not a linear layer of the model with a weight parameter.
        ValueError: A head is protected by the memory, or two heads share a weight, or read different features.
    """
    own = _name_heads(model, heads)
    protected = reference.protected if isinstance(reference, Anchor) else frozenset()
    for name in own:
        # The memory would take the change for training that was not projected.
        if any(f"{name}.{part}" in protected for part in ("weight", "bias")):
            raise ValueError(
                f"{name!r} is protected, but a head of an earlier task must be free: exclude=[{name + '.*'!r}]"
            )
    return own


def _name_heads(model: nn.Module, heads: Iterable[nn.Module]) -> dict[str, nn.Linear]:
    """Return heads by their names in a model, without duplicates.

    Raises:
        TypeError: A head is not a linear layer of the model with a weight parameter.
        ValueError: Two heads share a weight, or read different features.
    """
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, nn.Linear] = {}
    for head in heads:
        if not isinstance(head, nn.Linear):
            raise TypeError(f"heads must be nn.Linear layers, got {type(head).__name__}")
        if head not in names:
            raise TypeError(
                f"the head {head} is not a module of the model: create the memory for a module that contains body and "
                "heads, with the heads in exclude="
            )
        if "weight" not in head._parameters:
            raise TypeError(f"the weight of {names[head]!r} is parametrized: remove the parametrization first")
        found[names[head]] = head
    weights = {id(head.weight): name for name, head in found.items()}
    for name, head in found.items():
        if weights[id(head.weight)] != name:
            raise ValueError(f"{name!r} and {weights[id(head.weight)]!r} share one weight: pass one of them")
    widths = sorted({head.in_features for head in found.values()})
    if len(widths) > 1:
        raise ValueError(f"heads must read the same features, got dimensions {' and '.join(map(str, widths))}")
    return found


def _flatten_features(features: Tensor, heads: Sequence[nn.Linear]) -> Tensor:
    """Return features as rows [n, d] in the dtype of the heads, since autocast may have reduced their precision.

    Raises:
        ValueError: The features do not fit the heads.
    """
    if not isinstance(features, Tensor) or features.dim() < 2 or features.shape[-1] != heads[0].in_features:
        found = f"shape {tuple(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(f"features must return the inputs of the heads, [n, {heads[0].in_features}]; got {found}")
    return features.flatten(0, -2).to(heads[0].weight.dtype)
