"""Experience replay with a reservoir, ER_Res (Chaudhry et al., 2019): every step learns some old examples again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from sgp.methods.buffer import Reservoir
from sgp.methods.method import Batch
from sgp.methods.replay import Replay, ReplaySettings, example_rows, laid_out
from sgp.methods.supervised import Moment


@dataclass(frozen=True)
class ERSettings(ReplaySettings):
    """The memory of experience replay."""

    reservoir: Literal["uniform", "one-less"] = "uniform"
    """What the memory is a sample of: all examples alike, or later ones a little more, as in the published code."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reservoir not in ("uniform", "one-less"):
            raise ValueError(f"reservoir must be uniform or one-less, got {self.reservoir!r}")


class ER(Replay[ERSettings]):
    """One step on a batch B together with examples D of the memory, each through the head of its own task:

    loss = (sum over B and D of the cross-entropy) / (|B| + |D|).

    Then B is offered to the memory, which holds examples of the current task too.
    """

    name = "er"
    description = "experience replay: every step learns some kept examples of old tasks again"
    Settings = ERSettings

    def __init__(self, network: nn.Module, settings: ERSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self._reservoir = Reservoir(settings.memory_size, settings.reservoir)

    @property
    def buffer(self) -> Reservoir:
        return self._reservoir

    def loss(self, batch: Batch, head: int, moment: Moment) -> Tensor:
        if len(self.buffer) == 0:
            return super().loss(batch, head, moment)
        new, old = example_rows(batch, head), self.buffer.draw(self._count(batch))
        old["inputs"] = laid_out(old["inputs"], like=new["inputs"])
        inputs, labels, heads = (torch.cat([new[name], old[name]]) for name in ("inputs", "labels", "heads"))
        return F.cross_entropy(self.network(inputs, heads), labels)

    def step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> float:
        loss = super().step(batch, head, moment, optimizer)
        if self._offers(moment):
            self.buffer.add(example_rows(batch, head))
        return loss
