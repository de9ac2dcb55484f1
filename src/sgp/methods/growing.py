"""Base class of methods that grow the network: sizes of layers by task, and training outside the trainer's loop."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from sgp.methods.method import Batch, Moment, S, clone_tensors, concatenate_batches, sum_bytes, use_mode
from sgp.methods.wired import Tensors, WiredMethod, wire_network
from sgp.networks.widen import (
    Axis,
    connect_all_heads,
    find_axes,
    get_sizes,
    has_channels_last,
    mask_new_entries,
    resize,
    set_memory_format,
    slice_units,
)
from sgp.networks.wiring import Wiring
from sgp.patterns import find_pattern


class Growing(WiredMethod[S]):
    """Method under which layers grow from task to task; old units keep their places.

    A learned task uses the units that existed at its end, and tensors of its own: its head, and stored BatchNorm
    statistics. If all tasks share one head, each has its own copy. So a later task changes the outputs of an earlier
    one only by moving weights between old units.

    The network grows only in `begin_task` and `consolidate`: while the trainer trains a task, weights keep their
    shapes.

    Attributes:
        axes: Axes along which layers can grow.
        sizes: Number of units of each layer at the end of each learned task, by the task's head.
    """

    state_names: ClassVar[tuple[str, ...]] = ("_current", "_ends", "_lr", "sizes", "own")

    def __init__(self, network: nn.Module, settings: S, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.axes: tuple[Axis, ...] = ()
        self.sizes: dict[str, dict[str, int]] = {}
        # Layers whose output is the task's logits.
        self._ends: list[str] = []
        self._lr = 0.0
        # Which entries of each parameter may change; None for all of everything. Set by `attach`.
        self._gates: Tensors | None = None
        self._base = {name: parameter.numel() for name, parameter in network.named_parameters()}

    @abstractmethod
    def _build_gates(self) -> Tensors | None:
        """Return which entries of each parameter the trainer may change in this task; None for all."""

    def begin_task(self, head: int, batches: Iterable[Batch]) -> None:
        wiring = wire_network(self.network, batches, head, self.exclude)
        self._current = str(head)
        self._ends = [name for name, place in wiring.places.items() if place.sources and name not in wiring.gated]
        if not self.wiring.places:
            self._set_wiring(connect_all_heads(wiring, self.exclude))
            if not self.axes:
                raise ValueError(
                    f"{self.name} has nothing to grow in {type(self.network).__name__}: it has no hidden layer whose "
                    "units reach other layers without being added to those of another"
                )

    def _set_wiring(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self.axes = find_axes(self.network, wiring)

    @property
    def is_first_task(self) -> bool:
        """Whether the current task is the first."""
        return not self.sizes

    def count_units(self) -> dict[str, int]:
        """Return the number of units of each layer that can grow."""
        return get_sizes(self.network, self.axes)

    def count_old_units(self) -> dict[str, int]:
        """Return the number of units of each layer at the end of the previous task."""
        return list(self.sizes.values())[-1]

    def build_optimizer(self, kind: Callable[..., Optimizer], lr: float) -> Optimizer:
        if kind is not SGD:
            raise ValueError(f"{self.name} trains parts of the network by itself, with SGD: set optimizer=sgd")
        return super().build_optimizer(kind, lr)

    def attach(self, optimizer: Optimizer) -> None:
        # Training outside the trainer's loop uses the same learning rate.
        self._lr = optimizer.param_groups[0]["lr"]
        self._gates = self._build_gates()

    def _close_gates(self) -> Tensors:
        """Return gates through which nothing may change."""
        return {name: torch.zeros_like(each, dtype=torch.bool) for name, each in self.network.named_parameters()}

    def _open_head(self, gates: Tensors) -> Tensors:
        """Let the task's head change too."""
        for name, gate in gates.items():
            if name.rpartition(".")[0] in self._ends:
                gate.fill_(True)
        return gates

    def _open_new_parts(self) -> Tensors:
        """Return gates through which the units added since the previous task, and the head, may change."""
        return self._open_head(mask_new_entries(self.network, self.axes, self.count_old_units()))

    def adjust_gradients(self, moment: Moment, optimizer: Optimizer) -> None:
        for name, parameter in self.network.named_parameters():
            if parameter.grad is not None:
                self._add_penalties(name, parameter, parameter.grad)
                if self._gates is not None:
                    parameter.grad.mul_(self._gates[name])

    def _add_penalties(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        """Add the gradient of penalties to the gradient of the loss."""

    def _train(self, examples: Batch, size: int, epochs: int) -> None:
        """Train outside the trainer's loop, with the same steps and the first learning rate of the task."""
        inputs, labels = examples
        optimizer = self.build_optimizer(SGD, self._lr)
        with self._freeze_closed(), use_mode(self.network, training=True):
            for epoch in range(epochs):
                batches = split_rows(torch.randperm(len(labels)), size)
                for number, rows in enumerate(batches):
                    share = number / len(batches)
                    moment = Moment(epoch, share, (epoch + share) / epochs)
                    self.step((inputs[rows], labels[rows]), int(self._current), moment, optimizer)

    @contextmanager
    def _freeze_closed(self) -> Iterator[None]:
        """Compute no gradient of parameters that may not change at all, which is cheaper for a head alone."""
        gates = self._gates or {}
        closed = [each for name, each in self.network.named_parameters() if name in gates and not gates[name].any()]
        required = [each.requires_grad for each in closed]
        for each in closed:
            each.requires_grad_(False)
        try:
            yield
        finally:
            for each, before in zip(closed, required, strict=True):
                each.requires_grad_(before)

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        """Store the sizes and tensors that the task is run with from now on."""
        self.sizes.pop(self._current, None)  # the last entry is the newest task
        self.sizes[self._current] = self.count_units()
        heads = {n: each for n, each in self.network.named_parameters() if n.rpartition(".")[0] in self._ends}
        self.own[self._current] = clone_tensors(heads) | self._clone_norm_buffers()
        self._gates = None

    def _get_task_tensors(self, head: str) -> Tensors:
        return slice_units(self.network, self.axes, self.sizes[head]) | self.own[head]

    def state_dict(self) -> dict[str, Any]:
        return {"now": self.count_units(), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        with torch.random.fork_rng(devices=[]):
            resize(self.network, self.axes, state["now"])  # the values are with the weights
        # In the memory format of the network's own tensors: a product of other strides may round differently.
        last = has_channels_last(self.network)
        self.own = {
            head: {name: set_memory_format(tensor, last=last) for name, tensor in own.items()}
            for head, own in self.own.items()
        }

    def count_bytes(self) -> dict[str, int]:
        return {"of each task": sum_bytes(self.own)}

    def compute_capacity(self) -> float:
        """Count body and heads of all tasks so far, each head with the units of its time; other heads as built."""
        parameters = dict(self.network.named_parameters())
        heads = [{name: tensor for name, tensor in own.items() if name in parameters} for own in self.own.values()]
        learned = set().union(*heads)
        body = sum(
            self._base[name] if find_pattern(name, self.exclude) else parameter.numel()
            for name, parameter in parameters.items()
            if name not in learned
        )
        own = sum(tensor.numel() for head in heads for tensor in head.values())
        return 100 * (body + own) / sum(self._base.values())


def gather_examples(batches: Iterable[Batch]) -> tuple[Batch, int]:
    """Return all examples of some batches, and the size of a batch."""
    batches = list(batches)
    return concatenate_batches(batches), len(batches[0][1])


def split_rows(order: Tensor, size: int) -> tuple[Tensor, ...]:
    """Split rows into equal batches of at least `size`: BatchNorm cannot normalize a last batch of one."""
    return torch.tensor_split(order, max(1, len(order) // size))
