"""Experience replay with a reservoir, ER_Res (Chaudhry et al., 2019): every step learns some old examples again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from sgp.methods.buffer import Reservoir
from sgp.methods.method import Batch, Moment
from sgp.methods.replay import Replay, example_rows, joined
from sgp.methods.settings.er import ERFacts, ERSettings


class ER(ERFacts, Replay[ERSettings]):
    """One step on a batch B together with examples D of the memory, each through the head of its own task:

    loss = (sum over B and D of the cross-entropy) / (|B| + |D|).

    Then B is offered to the memory, which holds examples of the current task too.
    """

    def __init__(self, network: nn.Module, settings: ERSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self._reservoir = Reservoir(settings.memory_size, settings.reservoir)

    @property
    def buffer(self) -> Reservoir:
        return self._reservoir

    def loss(self, batch: Batch, head: int, moment: Moment) -> Tensor:
        inputs, labels, heads = joined(batch, head, self._draw(batch, head))
        return F.cross_entropy(self.network(inputs, heads), labels)

    def passes(self, batch: Batch, head: int) -> list[tuple[Tensor, int | Tensor]]:
        inputs, _, heads = joined(batch, head, self._draw(batch, head))
        return [(inputs, heads)]

    def step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> float:
        loss = super().step(batch, head, moment, optimizer)
        if self._offers(moment):
            self.buffer.add(example_rows(batch, head))
        return loss
