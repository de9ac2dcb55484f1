"""Heads of earlier tasks follow the features that a later one has moved, for a network that any method trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from sgp.experiments.batch_norm import MixedStatistics
from sgp.heads import compute_outputs, fit_heads


@torch.no_grad()
def earlier_answers(network: nn.Module, tasks: Sequence[int], batches: Iterable[Tensor], task: int) -> Tensor:
    """What the heads of some tasks answer to inputs of another [n, classes of all].

    Args:
        network: `network(inputs, task)`, with `heads`; it is as before afterwards.
        tasks: whose heads.
        batches: of inputs.
        task: that they are of.
    """
    heads = [head_of(network, each) for each in tasks]
    return torch.cat([compute_outputs(heads, features) for features in _features(network, batches, task)])


@torch.no_grad()
def realign(network: nn.Module, tasks: Sequence[int], answers: Tensor, batches: Iterable[Tensor], task: int) -> None:
    """Fit the heads of some tasks to what `earlier_answers` gave for the same batches."""

    def wanted() -> Iterator[tuple[Tensor, Tensor]]:
        seen = 0
        for features in _features(network, batches, task):
            yield features, answers[seen : seen + len(features)]
            seen += len(features)

    fit_heads([head_of(network, each) for each in tasks], wanted())


def head_of(network: nn.Module, task: int) -> nn.Linear:
    """The linear layer that answers for a task.

    Raises:
        AttributeError: the network has none.
    """
    head = network.get_submodule(f"heads.{task}")
    if not isinstance(head, nn.Linear):
        raise AttributeError(f"the head of task {task} is no linear layer: {head}")
    return head


def _features(network: nn.Module, batches: Iterable[Tensor], task: int) -> Iterator[Tensor]:
    """What the heads read [n, d], batch by batch. BatchNorm goes by the batch, before and after a task alike."""
    read: list[Tensor] = []
    hook = head_of(network, task).register_forward_pre_hook(lambda module, args: read.append(args[0]))
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        for inputs in batches:
            with MixedStatistics(0):
                network(inputs, task)
            yield read.pop()
    finally:
        hook.remove()
        for module, mode in modes.items():
            module.training = mode
