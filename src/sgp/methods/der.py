"""Dark experience replay, DER (Buzzega et al., NeurIPS 2020): kept examples are answered as when they were taken in."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from sgp.methods.buffer import Reservoir
from sgp.methods.method import Batch, Moment
from sgp.methods.replay import Replay, example_rows, laid_out
from sgp.methods.settings.der import DERFacts, DERSettings


class DER(DERFacts, Replay[DERSettings]):
    """A batch B, examples D of the memory with the logits z that they had when they were taken in, and with beta above
    0 (DER++) examples D' of another draw with their labels, each through the head of its own task:

    loss = mean CE(B) + alpha mean (network(D) - z)^2 + beta mean CE(D').

    The second mean is over all logits of all examples; heads with fewer classes have fewer. The three run through the
    network one after another, as published, so that BatchNorm does not mix them. The logits of B, those of this very
    forward pass, enter the memory with it.
    """

    def __init__(self, network: nn.Module, settings: DERSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self._reservoir = Reservoir(settings.memory_size)

    @property
    def buffer(self) -> Reservoir:
        return self._reservoir

    def loss(self, batch: Batch, head: int, moment: Moment) -> Tensor:
        return self._loss_and_logits(batch, head)[0]

    def step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> float:
        optimizer.zero_grad()
        loss, logits = self._loss_and_logits(batch, head)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if self._offers(moment):
            self._keep(batch, head, logits.detach())
        return loss.item()

    def bytes(self) -> dict[str, int]:
        held = self.buffer.bytes()
        logits = held.pop("logits", 0)
        return {"data": sum(held.values()), "logits": logits}

    def _loss_and_logits(self, batch: Batch, head: int) -> tuple[Tensor, Tensor]:
        """What the step descends, and the logits of the batch."""
        inputs, labels = batch
        logits = self.network(inputs, head)
        loss = F.cross_entropy(logits, labels)
        if len(self.buffer):
            drawn = self._draw(batch, head)
            answers = self.network(laid_out(drawn["inputs"], like=inputs), drawn["heads"])
            loss = loss + self.settings.alpha * distance(answers, drawn["logits"])
            if self.settings.beta:
                loss = loss + self.settings.beta * self._replay_loss(self._draw(batch, head), like=inputs)
        return loss, logits

    def _keep(self, batch: Batch, head: int, logits: Tensor) -> None:
        """Offer a batch to the memory, all logits as wide as the widest head so far has them."""
        kept = self.buffer.contents
        width = max(logits.shape[1], kept["logits"].shape[1] if kept else 0)
        if kept:
            kept["logits"] = _widened(kept["logits"], width)
        self.buffer.add(example_rows(batch, head) | {"logits": _widened(logits, width)})


def distance(answers: Tensor, stored: Tensor) -> Tensor:
    """The mean squared difference of logits. Both [n, classes] with -inf for classes that an example's head has not;
    stored ones may have more such columns."""
    stored = stored[:, : answers.shape[1]]
    # Selected and not multiplied by 0: inf - inf is no number, and its gradient is none either.
    own = stored > -math.inf
    return F.mse_loss(answers[own], stored[own])


def _widened(logits: Tensor, width: int) -> Tensor:
    """Logits with -inf for the classes that are missing to a width."""
    return F.pad(logits, (0, width - logits.shape[1]), value=-math.inf)
