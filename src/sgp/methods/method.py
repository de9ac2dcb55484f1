"""Base class of all methods of continual learning, and helpers that they share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import Optimizer

from sgp.methods.settings import MethodFacts, NoSettings

__all__ = ["Batch", "Method", "Moment", "NoSettings", "NormStatistics"]

# Inputs and labels of the same length.
Batch = tuple[Tensor, Tensor]
NormStatistics = Literal["shared", "per-task", "own"]
S = TypeVar("S")


@dataclass(frozen=True)
class Moment:
    """Position of a training step within a task.

    Attributes:
        epoch: Epoch of the task, from 0.
        share_of_epoch: Share of the epoch that is done, in [0, 1).
        share_of_task: Share of the task that is done if it uses all its epochs, in [0, 1).
    """

    epoch: int
    share_of_epoch: float
    share_of_task: float


class Stateful:
    """Object whose state is made up of some of its attributes.

    Attributes:
        state_names: Names of these attributes: numbers, strings, tensors, and dicts and lists of these. A leading
            underscore is not part of the name in `state_dict`.
    """

    state_names: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs. A method's `trained_module` is saved separately."""
        return {name.removeprefix("_"): _copy_state(getattr(self, name), clone=False) for name in self.state_names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        for name in self.state_names:
            # Copy the tensors, since some are changed in place later.
            setattr(self, name, _copy_state(state[name.removeprefix("_")], clone=True))


def _copy_state(value: Any, *, clone: bool) -> Any:
    """Copy dicts and lists and, with `clone`, the tensors in them."""
    if isinstance(value, Mapping):
        return {key: _copy_state(item, clone=clone) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy_state(item, clone=clone) for item in value]
    return value.clone() if clone and isinstance(value, Tensor) else value


class Method(MethodFacts, Stateful, Generic[S]):
    """Base class of all methods. It does nothing against forgetting; a subclass overrides what it needs.

    For each task the trainer calls `begin_task`, then `attach` with the optimizer that will train the task, and
    `consolidate` once it is trained. A method that acts through optimizer hooks alone (`attach`, `finalize_weights`,
    `consolidate`) works in every trainer. One that overrides `begin_task`, `trained_module`, `build_optimizer`,
    `compute_loss`, `compute_logits`, `step` or `get_passes` sets `supervised_only`: only the supervised trainer calls
    them.

    In `begin_task`, `compute_loss`, `step` and `consolidate`, torch's global random state belongs to the run and
    repeats when the run is resumed, so a method may draw from it. Between epochs only `state_dict` and `trained_module`
    are stored.

    Attributes:
        parameter_state_names: Further attributes of the state, with tensors by parameter name, each shaped like its
            parameter.

    Args:
        network: Network to train.
        settings: Settings of the class's own `Settings`.
        exclude: Patterns on names of modules that belong to single tasks (heads) and need no protection.
    """

    parameter_state_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, network: nn.Module, settings: S, *, exclude: Sequence[str] = ()) -> None:
        self.network = network
        self.settings = settings
        self.exclude = tuple(exclude)

    def begin_task(self, head: int, batches: Iterable[Batch]) -> None:
        """Prepare for a task. The trainer does not call this again when a run resumes inside the task.

        Args:
            head: Head of the task. If all tasks share one head it is the task's number, which networks then ignore.
            batches: Training examples of the task in random order.
        """

    def attach(self, optimizer: Optimizer) -> None:
        """Register hooks on the optimizer of the next task. Optimizers of earlier tasks are no longer used."""

    def project_gradients(self) -> None:
        """Project gradients instead of steps from now on, to show that Adam then forgets.

        Raises:
            ValueError: The method projects no steps.
        """
        raise ValueError(f"{self.name} projects no steps, so it cannot project gradients in their place")

    @property
    def trained_module(self) -> nn.Module:
        """The module that the optimizer trains and a checkpoint stores.

        It is the network, or a container of the network and parameters of the method. The best or averaged weights of a
        task are restored in all of it.
        """
        return self.network

    def build_optimizer(self, kind: Callable[..., Optimizer], lr: float) -> Optimizer:
        """Build the optimizer of a task. The trainer calls this for each task after `begin_task`."""
        return kind(self.trained_module.parameters(), lr=lr)

    def compute_loss(self, batch: Batch, head: int, moment: Moment) -> Tensor:
        """Compute the loss of a training step."""
        inputs, labels = batch
        return F.cross_entropy(self.compute_logits(inputs, head), labels)

    def compute_logits(self, inputs: Tensor, head: int) -> Tensor:
        """Compute the network's output for the current task or an earlier one."""
        out: Tensor = self.network(inputs, head)
        return out

    def run_with(self, tensors: Mapping[str, Tensor], inputs: Tensor, head: int | Tensor) -> Tensor:
        """Run the network with other tensors in place of its parameters and buffers of the same names."""
        out: Tensor = functional_call(self.network, dict(tensors), (inputs, head))
        return out

    def step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> float:
        """Take one training step, and return the loss."""
        optimizer.zero_grad()
        loss = self.compute_loss(batch, head, moment)
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self.adjust_gradients(moment, optimizer)
        optimizer.step()
        with torch.no_grad():
            self.finish_step(batch, head, moment, optimizer)
        return loss.item()

    def adjust_gradients(self, moment: Moment, optimizer: Optimizer) -> None:
        """Change the gradients between the backward pass and the optimizer's step, inside torch.no_grad."""

    def finish_step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> None:
        """Change weights or store examples after the optimizer's step, inside torch.no_grad."""

    def finalize_weights(self) -> None:
        """Apply pending changes to the weights before they are evaluated or saved."""

    def get_passes(self, batch: Batch, head: int) -> list[tuple[Tensor, int | Tensor]]:
        """Return the forward passes of a training step on a batch, from which BatchNorm statistics are estimated.

        Returns:
            The inputs of each pass with their head, or with the head of each input.
        """
        return [(batch[0], head)]

    @property
    def norm_statistics(self) -> NormStatistics:
        """Which stored BatchNorm statistics a task is evaluated with.

        `"shared"`: one set, estimated again after each task. `"per-task"`: a set for each task, because the network's
        own set must not change any more, for the sake of earlier tasks. `"own"`: the method manages them itself.
        """
        return "shared"

    @property
    def consolidation_batch(self) -> int | None:
        """Batch size in `consolidate`; None leaves it to the caller."""
        return None

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        """Update the method's state after a task.

        Args:
            batches: Training examples of the task in random order.
            log_likelihood: Function that runs the network and returns the log-likelihood of each example's label, [n].
        """

    def state_dict(self) -> dict[str, Any]:
        parameters = {name.removeprefix("_"): dict(getattr(self, name)) for name in self.parameter_state_names}
        return parameters | super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for name in self.parameter_state_names:
            setattr(self, name, match_parameters(self.network, state[name.removeprefix("_")]))

    def count_bytes(self) -> dict[str, int]:
        """Return the memory in bytes that the method needs in addition to the network, by use."""
        return {}

    def measure_free(self) -> dict[str, float]:
        """Return the free capacity of each layer, from 0 to 1; empty if the method blocks nothing."""
        return {}

    def describe_bases(self) -> dict[str, dict[str, Any]]:
        """Return some numbers that describe the bases of each layer; empty if the method has none."""
        return {}

    def compute_capacity(self) -> float:
        """Return the number of parameters that inference uses, in percent of the network's own."""
        return 100.0


def make_weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method as long as its object is alive, and otherwise returns None.

    A hook that is a bound method would be a reference cycle, which keeps the network alive.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **options: Any) -> Any:
        bound = reference()
        return None if bound is None else bound(*args, **options)

    return call


def match_parameters(network: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of saved tensors on the devices of the parameters of the same names.

    Raises:
        ValueError: The network has no parameter of a tensor's name and shape.
    """
    parameters = dict(network.named_parameters())
    found = {}
    for name, tensor in tensors.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            raise ValueError(f"the saved state is of another network: {name!r} {tuple(tensor.shape)} is not in it")
        found[name] = tensor.detach().clone().to(parameters[name].device)
    return found


def clone_tensors(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return detached copies of named tensors."""
    return {name: tensor.detach().clone() for name, tensor in dict(tensors).items()}


def sum_bytes(tensors: Any) -> int:
    """Return the size in bytes of all tensors in nested mappings and iterables."""
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum(map(sum_bytes, tensors.values() if isinstance(tensors, Mapping) else tensors))


def count_parameters(module: nn.Module) -> int:
    """Return the number of scalars in a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def use_mode(network: nn.Module, *, training: bool) -> Iterator[None]:
    """Run a network in train or eval mode; the mode of each module is restored afterwards."""
    modes = {module: module.training for module in network.modules()}
    network.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def concatenate_batches(batches: Iterable[Batch], count: int | None = None) -> Batch:
    """Return all examples of some batches, or the first `count`, as one batch."""
    taken: list[Batch] = []
    for batch in batches:
        taken.append(batch)
        if count is not None and sum(len(labels) for _, labels in taken) >= count:
            break
    inputs, labels = zip(*taken, strict=True)
    return torch.cat(inputs)[:count], torch.cat(labels)[:count]


def match_memory_format(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor in the memory format of another, on which the last bits of a convolution depend."""
    if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor
