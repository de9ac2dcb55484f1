"""Base class of methods that store examples of old tasks and train on them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from sgp.methods.buffer import Buffer
from sgp.methods.method import Batch, Method, match_memory_format
from sgp.methods.settings import ReplaySettings

R = TypeVar("R", bound=ReplaySettings)


class Replay(Method[R]):
    """Method whose only state is a buffer of examples.

    Attributes:
        buffer: Stored examples; a subclass sets it.
    """

    buffer: Buffer

    def state_dict(self) -> dict[str, Any]:
        return self.buffer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.buffer.load_state_dict(state)

    def count_bytes(self) -> dict[str, int]:
        return {"data": sum(self.buffer.count_bytes().values())}

    def get_passes(self, batch: Batch, head: int) -> list[tuple[Tensor, int | Tensor]]:
        drawn = self._draw(batch, head)
        replayed = [(match_memory_format(drawn["inputs"], like=batch[0]), drawn["heads"])] if drawn else []
        return [*super().get_passes(batch, head), *replayed]

    def _draw(self, batch: Batch, head: int) -> dict[str, Tensor]:
        """Draw stored examples for a step on a batch; empty if there are none."""
        return self.buffer.draw(self.settings.count_draws(len(batch[1])))

    def _compute_replay_loss(self, drawn: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Compute the mean cross-entropy of stored examples, each through its own head. like: inputs of the step."""
        inputs = match_memory_format(drawn["inputs"], like)
        return F.cross_entropy(self.network(inputs, drawn["heads"]), drawn["labels"])


def make_rows(batch: Batch, head: int) -> dict[str, Tensor]:
    """Return a batch as a buffer stores it: inputs, labels, and the head of each example."""
    inputs, labels = batch
    return {"inputs": inputs, "labels": labels, "heads": torch.full_like(labels, head)}


def append_drawn(batch: Batch, head: int, drawn: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, int | Tensor]:
    """Return the inputs and labels of a batch followed by those of drawn examples, and their head or heads."""
    inputs, labels = batch
    if not drawn:
        return inputs, labels, head
    heads = torch.cat([torch.full_like(labels, head), drawn["heads"]])
    all_inputs = torch.cat([inputs, match_memory_format(drawn["inputs"], like=inputs)])
    return all_inputs, torch.cat([labels, drawn["labels"]]), heads
