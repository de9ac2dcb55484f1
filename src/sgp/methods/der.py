"""Dark experience replay, DER (Buzzega et al., NeurIPS 2020): outputs for stored examples should stay as they were."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from sgp.methods.buffer import Reservoir
from sgp.methods.method import Batch, Moment, match_memory_format
from sgp.methods.replay import Replay, make_rows
from sgp.methods.settings import DERFacts, DERSettings


class DER(DERFacts, Replay[DERSettings]):
    """Replay with stored logits.

    A step uses a batch B, stored examples D with the logits z that they had when they were stored, and with beta above
    0 (DER++) examples D' of another draw with their labels, each through the head of its own task:

    loss = mean CE(B) + alpha mean (network(D) - z)^2 + beta mean CE(D').

    The second mean is over all logits of all examples; heads with fewer classes have fewer. The three sets run through
    the network one after another, as published, so that BatchNorm does not mix them. B is stored with the logits of
    this forward pass.
    """

    buffer: Reservoir

    def __init__(self, network: nn.Module, settings: DERSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.buffer = Reservoir(settings.memory_size)
        # Logits of the batch in the running step.
        self._logits: Tensor | None = None

    def compute_loss(self, batch: Batch, head: int, moment: Moment) -> Tensor:
        inputs, labels = batch
        logits = self.network(inputs, head)
        self._logits = logits.detach()
        loss = F.cross_entropy(logits, labels)
        if len(self.buffer):
            drawn = self._draw(batch, head)
            outputs = self.network(match_memory_format(drawn["inputs"], like=inputs), drawn["heads"])
            loss = loss + self.settings.alpha * compute_distance(outputs, drawn["logits"])
            if self.settings.beta:
                loss = loss + self.settings.beta * self._compute_replay_loss(self._draw(batch, head), like=inputs)
        return loss

    def finish_step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> None:
        assert self._logits is not None
        if self.settings.is_filled(moment.epoch):
            self._store(batch, head, self._logits)
        self._logits = None

    def count_bytes(self) -> dict[str, int]:
        sizes = self.buffer.count_bytes()
        logits = sizes.pop("logits", 0)
        return {"data": sum(sizes.values()), "logits": logits}

    def _store(self, batch: Batch, head: int, logits: Tensor) -> None:
        """Offer a batch to the memory, with all logits padded to the widest head so far."""
        stored = self.buffer.contents
        width = max(logits.shape[1], stored["logits"].shape[1] if stored else 0)
        if stored:
            stored["logits"] = _pad(stored["logits"], width)
        self.buffer.add(make_rows(batch, head) | {"logits": _pad(logits, width)})


def compute_distance(outputs: Tensor, stored: Tensor) -> Tensor:
    """Compute the mean squared difference of logits.

    Args:
        outputs: Logits [n, classes], with -inf for classes that an example's head does not have.
        stored: Stored logits; they may have more columns of -inf.
    """
    stored = stored[:, : outputs.shape[1]]
    # Selected instead of multiplied by 0: inf - inf is NaN, and so is its gradient.
    own = stored > -math.inf
    return F.mse_loss(outputs[own], stored[own])


def _pad(logits: Tensor, width: int) -> Tensor:
    """Pad logits to a width, with -inf for the missing classes."""
    return F.pad(logits, (0, width - logits.shape[1]), value=-math.inf)
