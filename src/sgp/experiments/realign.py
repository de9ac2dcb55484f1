"""Fit the heads of earlier tasks to features that a later task has moved, for a network that any method trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from sgp.experiments.norm_policy import MixedNorm
from sgp.heads import compute_outputs, fit_heads
from sgp.methods.method import use_mode


@torch.no_grad()
def compute_logits(network: nn.Module, tasks: Sequence[int], batches: Iterable[Tensor], task: int) -> Tensor:
    """Compute the logits of some tasks' heads for inputs of another task, [n, classes of all heads].

    Args:
        network: Network called as `network(inputs, task)`, with `heads`; its modes are restored afterwards.
        tasks: Tasks whose heads are evaluated.
        batches: Iterable of inputs.
        task: Task of the inputs.
    """
    heads = [get_head(network, each) for each in tasks]
    return torch.cat([compute_outputs(heads, features) for features in _compute_features(network, batches, task)])


@torch.no_grad()
def realign(network: nn.Module, tasks: Sequence[int], logits: Tensor, batches: Iterable[Tensor], task: int) -> None:
    """Fit the heads of some tasks to the logits that `compute_logits` returned for the same batches."""

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for features in _compute_features(network, batches, task):
            yield features, logits[start : start + len(features)]
            start += len(features)

    fit_heads([get_head(network, each) for each in tasks], pairs())


def get_head(network: nn.Module, task: int) -> nn.Linear:
    """Return the linear head of a task.

    Raises:
        AttributeError: The network has none.
    """
    head = network.get_submodule(f"heads.{task}")
    if not isinstance(head, nn.Linear):
        raise AttributeError(f"the head of task {task} is not a linear layer: {head}")
    return head


def _compute_features(network: nn.Module, batches: Iterable[Tensor], task: int) -> Iterator[Tensor]:
    """Yield the inputs of a task's head [n, d], batch by batch, normalized by each batch's own statistics."""
    found: list[Tensor] = []
    hook = get_head(network, task).register_forward_pre_hook(lambda module, args: found.append(args[0]))
    with hook, use_mode(network, training=False):
        for inputs in batches:
            with MixedNorm(0):
                network(inputs, task)
            yield found.pop()
