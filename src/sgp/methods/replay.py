"""What methods share that keep examples of old tasks and learn from them again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from sgp.methods.buffer import Buffer
from sgp.methods.method import Batch, Method, Moment
from sgp.methods.settings.replay import ReplaySettings

R = TypeVar("R", bound=ReplaySettings)


class Replay(Method[R]):
    """A method whose only state is a buffer of examples."""

    @property
    @abstractmethod
    def buffer(self) -> Buffer:
        """What is kept."""

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        """What is kept of a task was taken in while it was learned."""

    def state_dict(self) -> dict[str, Any]:
        return self.buffer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.buffer.load_state_dict(state)

    def bytes(self) -> dict[str, int]:
        return {"data": sum(self.buffer.bytes().values())}

    def passes(self, batch: Batch, head: int) -> list[tuple[Tensor, int | Tensor]]:
        drawn = self._draw(batch, head)
        again = [(laid_out(drawn["inputs"], like=batch[0]), drawn["heads"])] if drawn else []
        return [*super().passes(batch, head), *again]

    def _draw(self, batch: Batch, head: int) -> dict[str, Tensor]:
        """Examples of the memory for a step on a batch; empty if there are none."""
        return self.buffer.draw(self._count(batch))

    def _offers(self, moment: Moment) -> bool:
        """Whether the examples of this step are offered to the memory."""
        return self.settings.fill == "every-epoch" or moment.epoch == 0

    def _count(self, batch: Batch) -> int:
        """How many examples to draw beside a batch."""
        return self.settings.memory_batch or len(batch[1])

    def _replay_loss(self, drawn: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """The mean cross-entropy of kept examples, each through its own head. like: inputs of the step."""
        return F.cross_entropy(self.network(laid_out(drawn["inputs"], like), drawn["heads"]), drawn["labels"])


def example_rows(batch: Batch, head: int) -> dict[str, Tensor]:
    """A batch as a buffer keeps it: inputs as the network takes them, labels, and the head of each."""
    inputs, labels = batch
    return {"inputs": inputs, "labels": labels, "heads": torch.full_like(labels, head)}


def joined(batch: Batch, head: int, drawn: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, int | Tensor]:
    """Inputs and labels of a batch followed by those of examples that were drawn, if any; and their head, or heads."""
    inputs, labels = batch
    if not drawn:
        return inputs, labels, head
    heads = torch.cat([torch.full_like(labels, head), drawn["heads"]])
    return torch.cat([inputs, laid_out(drawn["inputs"], like=inputs)]), torch.cat([labels, drawn["labels"]]), heads


def laid_out(inputs: Tensor, like: Tensor) -> Tensor:
    """Inputs in the memory format of others, on which the last bits of a convolution depend."""
    images_last = like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)
    return inputs.contiguous(memory_format=torch.channels_last) if images_last else inputs
