"""Loss and accuracy of a network on the examples of one task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgp.benchmarks.stream import Examples


class Score(NamedTuple):
    """On a set of examples; None where there are none.

    Attributes:
        loss: mean cross-entropy.
        accuracy: in percent.
    """

    loss: float | None
    accuracy: float | None


@torch.no_grad()
def evaluate(
    network: nn.Module,
    examples: Examples,
    head: int,
    *,
    batch: int,
    order: Tensor,
    logits: Callable[[Tensor, int], Tensor] | None = None,
) -> Score:
    """Score a network in eval mode; its mode is as before afterwards.

    Args:
        network: `network(inputs, head)` gives logits.
        examples: to score it on.
        head: of the examples' task.
        batch: how many at once. It matters where BatchNorm divides by the batch's own statistics.
        order: in which they come, [n], since batches of a single class would have statistics of their own.
        logits: what gives them instead of the network's own forward pass.
    """
    answer = logits or network
    if len(order) == 0:
        return Score(None, None)
    was_training = network.training
    network.eval()
    try:
        loss, correct = 0.0, 0
        for rows in batches(order, batch):
            answers, labels = answer(examples.inputs[rows], head), examples.labels[rows]
            loss += float(F.cross_entropy(answers, labels, reduction="sum"))
            correct += int((answers.argmax(dim=1) == labels).sum())
    finally:
        network.train(was_training)
    return Score(loss / len(order), 100 * correct / len(order))


def mean_score(scores: Sequence[Score]) -> Score:
    """Of several tasks, each with the same weight."""
    losses = [score.loss for score in scores if score.loss is not None]
    accuracies = [score.accuracy for score in scores if score.accuracy is not None]
    return Score(sum(losses) / len(losses), sum(accuracies) / len(accuracies)) if losses else Score(None, None)


def batches(order: Tensor, size: int) -> Iterator[Tensor]:
    """Rows in lots of a size, the last one smaller; never one of a single row, which BatchNorm cannot normalise."""
    lots = list(torch.split(order, size))
    if len(lots) > 1 and len(lots[-1]) == 1:
        lots[-2:] = [torch.cat(lots[-2:])]
    yield from lots
