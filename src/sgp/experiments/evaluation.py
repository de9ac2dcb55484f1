"""Loss and accuracy of a network on the examples of one task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgp.benchmarks.stream import Examples
from sgp.methods.method import use_mode


class Score(NamedTuple):
    """Loss and accuracy on a set of examples; None if there are none.

    Attributes:
        loss: Mean cross-entropy.
        accuracy: Accuracy in percent.
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
    """Evaluate a network in eval mode, and restore its mode afterwards.

    Args:
        network: Network that returns logits as `network(inputs, head)`.
        examples: Examples to evaluate it on.
        head: Head of the examples' task.
        batch: Batch size. It matters where BatchNorm normalizes by the batch's own statistics.
        order: Order of the examples [n]; batches of a single class would have statistics of their own.
        logits: Function that returns the logits in place of the network.
    """
    compute_logits = logits or network
    if len(order) == 0:
        return Score(None, None)
    loss, correct = 0.0, 0
    with use_mode(network, training=False):
        for rows in split_rows(order, batch):
            outputs, labels = compute_logits(examples.inputs[rows], head), examples.labels[rows]
            loss += float(F.cross_entropy(outputs, labels, reduction="sum"))
            correct += int((outputs.argmax(dim=1) == labels).sum())
    return Score(loss / len(order), 100 * correct / len(order))


def average_scores(scores: Sequence[Score]) -> Score:
    """Return the mean loss and accuracy of several tasks, each with the same weight."""
    losses = [score.loss for score in scores if score.loss is not None]
    accuracies = [score.accuracy for score in scores if score.accuracy is not None]
    return Score(sum(losses) / len(losses), sum(accuracies) / len(accuracies)) if losses else Score(None, None)


def split_rows(order: Tensor, size: int) -> Iterator[Tensor]:
    """Split rows into batches. A last batch of a single row, which BatchNorm cannot normalize, joins the one before."""
    batches = list(torch.split(order, size))
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    yield from batches
