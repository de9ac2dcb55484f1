"""A-GEM (Chaudhry et al., ICLR 2019): no step that would raise the loss on stored examples of old tasks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sgp.methods.buffer import ClassRings
from sgp.methods.method import Batch, Moment
from sgp.methods.replay import Replay, make_rows
from sgp.methods.settings import AGEMFacts, AGEMSettings


class AGEM(AGEMFacts, Replay[AGEMSettings]):
    """Keeps the gradient g of all weights together from pointing against the gradient g_ref of old tasks.

    g_ref is the gradient of the mean loss on examples drawn from the memory of earlier tasks, each through the head of
    its own task:

    if g . g_ref < 0:  g := g - (g . g_ref / g_ref . g_ref) g_ref.

    The memory has the latest examples of each class. Those of the current task are not used until it is learned.
    """

    buffer: ClassRings

    def __init__(self, network: nn.Module, settings: AGEMSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.buffer = ClassRings(settings.memory_size, settings.per_class)
        self._reference: list[Tensor | None] = []

    def step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> float:
        optimizer.zero_grad()
        drawn = self._draw(batch, head)
        if drawn:
            self._compute_replay_loss(drawn, like=batch[0]).backward()  # type: ignore[no-untyped-call]
        self._reference = [weight.grad for weight in _list_weights(optimizer)]
        optimizer.zero_grad(set_to_none=True)  # the reference itself must not become zero
        return super().step(batch, head, moment, optimizer)

    def adjust_gradients(self, moment: Moment, optimizer: Optimizer) -> None:
        project_gradients(_list_weights(optimizer), self._reference)

    def finish_step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> None:
        self._reference = []
        if self.settings.is_filled(moment.epoch):
            self.buffer.add(make_rows(batch, head), batch[1], head)

    def _draw(self, batch: Batch, head: int) -> dict[str, Tensor]:
        places = self.buffer.find_other_tasks(head)
        chosen = places[torch.randperm(len(places))[: self.settings.count_draws(len(batch[1]))]]
        return self.buffer.take(chosen) if len(chosen) else {}


def _list_weights(optimizer: Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


@torch.no_grad()
def project_gradients(weights: Sequence[Tensor], reference: Sequence[Tensor | None]) -> None:
    """Remove from the weights' gradients, as one vector, the part that points against a reference.

    Args:
        weights: Weights whose gradients are changed; a missing gradient is zero.
        reference: Reference gradient of each weight; None is zero.
    """
    pairs = [(weight, other) for weight, other in zip(weights, reference, strict=True) if other is not None]
    # A missing gradient need not stay zero: the batch does not reach the heads of old tasks, the reference does.
    product = sum(_dot(weight.grad, other) for weight, other in pairs if weight.grad is not None)
    length = sum(_dot(other, other) for _, other in pairs)
    # The length may be 0 by rounding too; then there is no direction to point against.
    if product >= 0 or length == 0:
        return
    scale = -product / length
    for weight, other in pairs:
        if weight.grad is None:
            weight.grad = other * scale
        else:
            weight.grad.add_(other, alpha=scale)


def _dot(one: Tensor, other: Tensor) -> float:
    return float(torch.dot(one.flatten(), other.flatten()))
