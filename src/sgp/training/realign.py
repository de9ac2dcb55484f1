"""Heads of earlier tasks follow the features that a later task has moved.

Where features drift, a head that stays reads them wrongly, though most of what it needs is still there. No example of
its task is at hand; but what the drift does to its answers can be seen on the examples of the new task. So a head is
changed by least squares to answer to these what it answered before. Semantic drift compensation (Yu et al., CVPR
2020) moves class means in this way, learnable drift compensation (Gomez-Villa et al., ECCV 2024) features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from sgp.training.batch_norm import MixedStatistics

# Of the mean energy of a feature: what keeps heads where they are along directions that the new task hardly has.
RIDGE = 0.1


@torch.no_grad()
def answers_of(network: nn.Module, tasks: Sequence[int], batches: Iterable[Tensor], task: int) -> Tensor:
    """What the heads of some tasks answer to inputs of another [n, classes of all].

    Args:
        network: `network(inputs, task)`, with `heads`; it is as before afterwards.
        tasks: whose heads.
        batches: of inputs.
        task: that they are of.
    """
    heads = [head_of(network, each) for each in tasks]
    return torch.cat([_answers(heads, features) for features in _features(network, batches, task)])


@torch.no_grad()
def realign(network: nn.Module, tasks: Sequence[int], answers: Tensor, batches: Iterable[Tensor], task: int) -> None:
    """Change heads so that they answer to inputs as they did, as far as a linear layer can and a ridge lets them.

    With X the features [n, d] and A the answers that are wanted, the weights W of all these heads become W + D^T with

        D = (X^T X + r I)^-1 X^T (A - X W^T)

    Args:
        network: `network(inputs, task)`, with `heads`.
        tasks: whose heads.
        answers: to the same batches at an earlier moment, as `answers_of` gave them.
        batches: of inputs.
        task: that they are of.
    """
    heads = [head_of(network, each) for each in tasks]
    with_bias = any(head.bias is not None for head in heads)
    gram = product = torch.zeros(())
    seen = 0
    for features in _features(network, batches, task):
        error = answers[seen : seen + len(features)] - _answers(heads, features)
        seen += len(features)
        # A bias is the weight of a feature that is always 1.
        rows = nn.functional.pad(features, (0, 1), value=1.0) if with_bias else features
        gram, product = gram + (rows.T @ rows).double(), product + (rows.T @ error).double()
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    changes = torch.linalg.solve(gram, product).T.split([head.out_features for head in heads])
    for head, change in zip(heads, changes, strict=True):
        head.weight.add_(change[:, : head.in_features])
        if head.bias is not None:
            head.bias.add_(change[:, -1])


def head_of(network: nn.Module, task: int) -> nn.Linear:
    """The linear layer that answers for a task.

    Raises:
        AttributeError: the network has none.
    """
    head = network.get_submodule(f"heads.{task}")
    if not isinstance(head, nn.Linear):
        raise AttributeError(f"the head of task {task} is no linear layer: {head}")
    return head


def _answers(heads: Sequence[nn.Linear], features: Tensor) -> Tensor:
    return torch.cat([head(features) for head in heads], dim=1)


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
