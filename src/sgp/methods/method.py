"""Base class of the methods of continual learning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from sgp.methods.facts import MethodFacts, NoSettings

# Inputs and labels of the same length.
Batch = tuple[Tensor, Tensor]
NormStatistics = Literal["one", "each", "own"]
S = TypeVar("S")

__all__ = ["Batch", "Method", "Moment", "NoSettings", "NormStatistics"]


@dataclass(frozen=True)
class Moment:
    """Position of a training step inside a task.

    Attributes:
        epoch: Epoch of the task, from 0.
        share_of_epoch: Share of the epoch that is done, in [0, 1).
        share_of_task: Share of the task that is done if it uses all its epochs, in [0, 1).
    """

    epoch: int
    share_of_epoch: float
    share_of_task: float


class Method(MethodFacts, Generic[S]):
    """Base class of all methods. By itself it does nothing about forgetting; a subclass overrides what it does.

    For each task the trainer calls `begin`, then `attach` with the optimizer that will train it, and `consolidate` once
    it is trained. A method that acts through hooks of the optimizer alone (`attach`, `settle`, `consolidate`) works in
    every trainer. One that overrides `begin`, `trained`, `optimizer`, `loss`, `step`, `passes` or `logits` sets
    `supervised_only`: only the supervised trainer asks for them.

    In `begin`, `loss`, `step` and `consolidate`, torch's global random state belongs to the run and repeats when
    the run is resumed, so a method may draw from it. Between epochs only `state_dict` and `trained` are kept.

    Args:
        network: Network to train.
        settings: Settings of the class's own `Settings`.
        exclude: Patterns on names of modules that belong to single tasks (heads) and need no protection.
    """

    def __init__(self, network: nn.Module, settings: S, *, exclude: Sequence[str] = ()) -> None:
        self.network = network
        self.settings = settings
        self.exclude = tuple(exclude)

    def begin(self, head: int, batches: Iterable[Batch]) -> None:
        """Prepare for a task. Not called again when a run resumes inside the task.

        Args:
            head: Head of the task. If all tasks share one head it is the task's number, which networks then ignore.
            batches: Training examples of the task in random order.
        """

    def attach(self, optimizer: Optimizer) -> None:
        """Act on every later step of an optimizer. Optimizers of earlier tasks are not used any more."""

    def project_gradients(self) -> None:
        """Project gradients before the optimizer sees them, in place of its steps; to show that Adam then forgets."""
        raise ValueError(f"{self.name} projects no steps, so it cannot project gradients in their place")

    @property
    def trained(self) -> nn.Module:
        """What the optimizer trains and what the weights of a checkpoint are: the network, or a container that has
        parameters of the method beside it. The best or averaged weights of a task are restored in all of it."""
        return self.network

    def optimizer(self, kind: Callable[..., Optimizer], lr: float) -> Optimizer:
        """Return the optimizer of a task, of the kind that was asked for; made anew for each task after `begin`."""
        return kind(self.trained.parameters(), lr=lr)

    def loss(self, batch: Batch, head: int, moment: Moment) -> Tensor:
        """Compute the loss of a training step."""
        inputs, labels = batch
        return F.cross_entropy(self.network(inputs, head), labels)

    def step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> float:
        """Take one training step, and return the loss."""
        optimizer.zero_grad()
        loss = self.loss(batch, head, moment)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    def settle(self) -> None:
        """Bring the weights to where the method wants them, before they are evaluated or saved."""

    def passes(self, batch: Batch, head: int) -> list[tuple[Tensor, int | Tensor]]:
        """Return what a training step on a batch runs through the network, pass by pass: inputs, and their head or the
        head of each. Stored norm statistics are estimated from such passes.
        """
        return [(batch[0], head)]

    def logits(self, inputs: Tensor, head: int) -> Tensor:
        """Compute the network's answer for a task that was learned, or is being learned, in eval mode."""
        out: Tensor = self.network(inputs, head)
        return out

    @property
    def statistics(self) -> NormStatistics:
        """Stored statistics of BatchNorm: one set, estimated anew after each task; of each task, since the network's
        must stay as they are for the sake of earlier ones; or the method's own business.
        """
        return "one"

    @property
    def consolidation_batch(self) -> int | None:
        """How many examples should run through the network at once in `consolidate`; None leaves it to the caller."""
        return None

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        """Update the method's state after a task.

        Args:
            batches: Training examples of the task in random order.
            log_likelihood: Function that returns the log-likelihood of each example's label under the network, [n]. It
                runs the network.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a resumed run needs beside the network's weights: tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""

    def bytes(self) -> dict[str, int]:
        """Memory that is held beside the network, by what it is for."""
        return {}

    def free(self) -> dict[str, float]:
        """The share of each layer that later tasks may still use; empty if the method blocks nothing."""
        return {}

    def bases(self) -> dict[str, dict[str, Any]]:
        """What the bases of each layer are like after a task, in few numbers; empty if the method has none."""
        return {}

    def capacity(self) -> float:
        """Parameters that inference uses, in percent of those of the network alone."""
        return 100.0


def beside_parameters(network: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of saved tensors, one for each of some parameters, on the devices of these.

    Raises:
        ValueError: the network has no such parameter.
    """
    parameters = dict(network.named_parameters())
    found = {}
    for name, tensor in tensors.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            raise ValueError(f"the saved state is of another network: {name!r} {tuple(tensor.shape)} is not in it")
        found[name] = tensor.detach().clone().to(parameters[name].device)
    return found
