"""A-GEM (Chaudhry et al., ICLR 2019): no step that would raise the loss on kept examples of old tasks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sgp.methods.buffer import ClassRings
from sgp.methods.method import Batch, Moment
from sgp.methods.replay import Replay, example_rows
from sgp.methods.settings.a_gem import AGEMFacts, AGEMSettings


class AGEM(AGEMFacts, Replay[AGEMSettings]):
    """The gradient g of all weights together must not point against g_ref, that of the mean loss on examples drawn from
    the memory of earlier tasks, each through the head of its own task:

    if g . g_ref < 0:  g := g - (g . g_ref / g_ref . g_ref) g_ref.

    The memory has the latest examples of each class. Those of the current task take no part until it is learned.
    """

    def __init__(self, network: nn.Module, settings: AGEMSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self._rings = ClassRings(settings.memory_size, settings.per_class)

    @property
    def buffer(self) -> ClassRings:
        return self._rings

    def step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> float:
        optimizer.zero_grad()
        drawn = self._draw(batch, head)
        if drawn:
            self._replay_loss(drawn, like=batch[0]).backward()  # type: ignore[no-untyped-call]
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        reference = [weight.grad for weight in weights]
        optimizer.zero_grad(set_to_none=True)  # not the reference itself
        loss = self.loss(batch, head, moment)
        loss.backward()  # type: ignore[no-untyped-call]
        project(weights, reference)
        optimizer.step()
        if self._offers(moment):
            self.buffer.add(example_rows(batch, head), batch[1], head)
        return loss.item()

    def _draw(self, batch: Batch, head: int) -> dict[str, Tensor]:
        places = self.buffer.others(head)
        chosen = places[torch.randperm(len(places))[: self._count(batch)]]
        return self.buffer.take(chosen) if len(chosen) else {}


@torch.no_grad()
def project(weights: Sequence[Tensor], reference: Sequence[Tensor | None]) -> None:
    """Take from the gradients of the weights, as one vector, what points against a reference; None is zero."""
    referred = [(weight, other) for weight, other in zip(weights, reference, strict=True) if other is not None]
    # None is zero here too, but need not stay so: the batch does not reach the heads of old tasks, the reference does.
    product = sum(_dot(weight.grad, other) for weight, other in referred if weight.grad is not None)
    length = sum(_dot(other, other) for _, other in referred)
    # Without length, be it by rounding, there is nothing to point against.
    if product >= 0 or length == 0:
        return
    scale = -product / length
    for weight, other in referred:
        if weight.grad is None:
            weight.grad = other * scale
        else:
            weight.grad.add_(other, alpha=scale)


def _dot(one: Tensor, other: Tensor) -> float:
    return float(torch.dot(one.flatten(), other.flatten()))
