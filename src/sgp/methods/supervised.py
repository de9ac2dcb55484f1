"""Methods that have a say in loss, batch or forward pass, so that only the supervised loop can train them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from sgp.methods.method import Batch, Method, S


@dataclass(frozen=True)
class Moment:
    """When a training step is.

    Attributes:
        epoch: which of the task's, from 0.
        share_of_epoch: how much of it is done, in [0, 1).
        share_of_task: how much of the task is done if it uses all its epochs, in [0, 1).
    """

    epoch: int
    share_of_epoch: float
    share_of_task: float


class Supervised(Method[S]):
    """A method of the supervised loop. Every part has a plain form; a method overrides what it does otherwise.

    In `begin`, `loss`, `step` and `consolidate` torch's global random state is the run's own and repeats when a run is
    taken up again, so a method may draw from it. Between epochs `state_dict` and `trained` are all that is kept.
    """

    def begin(self, head: int, batches: Iterable[Batch]) -> None:
        """A task begins; not called again when a run goes on inside it.

        Args:
            head: of the task. Where all tasks share one head it is the task's number, which networks then ignore.
            batches: its training examples in random order.
        """

    @property
    def trained(self) -> nn.Module:
        """What the optimizer trains and what the weights of a checkpoint are: the network, or a container that has
        parameters of the method beside it. The best or averaged weights of a task are restored in all of it."""
        return self.network

    def optimizer(self, kind: Callable[..., Optimizer], lr: float) -> Optimizer:
        """What trains a task, made anew for each after `begin`, of the kind that was asked for. A checkpoint has its
        state."""
        return kind(self.trained.parameters(), lr=lr)

    def loss(self, batch: Batch, head: int, moment: Moment) -> Tensor:
        """What a training step descends."""
        inputs, labels = batch
        return F.cross_entropy(self.network(inputs, head), labels)

    def step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> float:
        """One training step; the loss."""
        optimizer.zero_grad()
        loss = self.loss(batch, head, moment)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    def passes(self, batch: Batch, head: int) -> list[tuple[Tensor, int | Tensor]]:
        """What a training step on a batch runs through the network, pass by pass: inputs, and their head or the head of
        each. Statistics of BatchNorm that are stored are estimated from such passes.
        """
        return [(batch[0], head)]

    def logits(self, inputs: Tensor, head: int) -> Tensor:
        """What the network answers for a task that has been learned, or is being learned, in eval mode."""
        out: Tensor = self.network(inputs, head)
        return out


class Joint(Supervised[S]):
    """A method that learns all tasks at once. An epoch goes through all of them, each batch is of one task."""
