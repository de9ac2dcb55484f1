"""What a method is: it acts on a network while an optimizer trains it, and takes in each task once it is learned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from torch import Tensor, nn
from torch.optim import Optimizer

# Inputs and labels of the same length.
Batch = tuple[Tensor, Tensor]
NormStatistics = Literal["one", "each", "own"]
S = TypeVar("S")


@dataclass(frozen=True)
class NoSettings:
    """For methods that have nothing to set."""


def check_choices(settings: object) -> None:
    """Refuse a value that is none of those that its field's Literal has: elsewhere it would pass for the last one."""
    for name, hint in get_type_hints(type(settings)).items():
        value, choices = getattr(settings, name), get_args(hint)
        if get_origin(hint) is Literal and value not in choices:
            raise ValueError(f"{name} must be {' or '.join(map(str, choices))}, got {value!r}")


class Method(ABC, Generic[S]):
    """A method of continual learning that does not know who trains the network.

    It acts through hooks on gradients and on the optimizer's step alone, so the supervised loop and any other training
    can use it. Its life: built for a network; then for each task `attach` to the optimizer that will train it, and
    `consolidate` once it has been trained.

    Attributes:
        name: in the registry and on the command line.
        description: one line for `sgp list methods`.
        Settings: a frozen dataclass; a benchmark's values for it are in sgp.paper.
        keeps_data: whether examples of old tasks are stored.
        rounds_weights: whether `consolidate` changes weights, so that nothing can be fitted to them before it.
        packages: that its numbers depend on beside torch, as they are installed; runs note their versions.

    Args:
        network: what is trained.
        settings: of the class's own Settings.
        exclude: patterns on names of modules that belong to single tasks (heads), which nothing need protect.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    Settings: ClassVar[type[Any]]
    keeps_data: ClassVar[bool] = False
    rounds_weights: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = ()

    def __init__(self, network: nn.Module, settings: S, *, exclude: Sequence[str] = ()) -> None:
        self.network = network
        self.settings = settings
        self.exclude = tuple(exclude)

    @abstractmethod
    def attach(self, optimizer: Optimizer) -> None:
        """Act on every later step of this optimizer; those of earlier tasks are done with."""

    def settle(self) -> None:
        """Bring the weights to where the method wants them, before they are evaluated or saved."""

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

    @abstractmethod
    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        """Take in the task that was just learned.

        Args:
            batches: its training examples in random order.
            log_likelihood: of each example's label under the network, [n]; computing it runs the network.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs beside the network's weights: tensors and plain values."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""

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
