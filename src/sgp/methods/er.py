"""Experience replay with a reservoir, ER_Res (Chaudhry et al., 2019): every step trains on some old examples again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from sgp.methods.buffer import Reservoir
from sgp.methods.method import Batch, Moment
from sgp.methods.replay import Replay, append_drawn, make_rows
from sgp.methods.settings import ERFacts, ERSettings


class ER(ERFacts, Replay[ERSettings]):
    """One step on a batch B together with stored examples D, each through the head of its own task.

    loss = (sum over B and D of the cross-entropy) / (|B| + |D|).

    Then B is offered to the memory, which also holds examples of the current task.
    """

    buffer: Reservoir

    def __init__(self, network: nn.Module, settings: ERSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.buffer = Reservoir(settings.memory_size, settings.reservoir)

    def compute_loss(self, batch: Batch, head: int, moment: Moment) -> Tensor:
        inputs, labels, heads = append_drawn(batch, head, self._draw(batch, head))
        return F.cross_entropy(self.network(inputs, heads), labels)

    def get_passes(self, batch: Batch, head: int) -> list[tuple[Tensor, int | Tensor]]:
        inputs, _, heads = append_drawn(batch, head, self._draw(batch, head))
        return [(inputs, heads)]

    def finish_step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> None:
        if self.settings.is_filled(moment.epoch):
            self.buffer.add(make_rows(batch, head))
