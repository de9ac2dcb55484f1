"""What methods that grow the network share: sizes of each task's time, and training on the side."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Optimizer

from sgp.methods.method import Batch, Method, Moment, S
from sgp.networks.widen import Axis, axes_of, cut, laid_out, outside, resize, sizes_of, with_all_heads
from sgp.networks.widen import channels_last as has_channels_last
from sgp.networks.wiring import Wiring, find_wiring
from sgp.patterns import find_pattern

Tensors = dict[str, Tensor]


class Growing(Method[S]):
    """A method under which layers grow from task to task; old units keep their places.

    A task that has been learned is answered by the units that there were at its end, and by what it has of its own: its
    head, and stored statistics of BatchNorm. Where all tasks share one head each has its own copy. So a later task
    changes what an earlier one answers only by moving weights between old units.

    The network grows in `begin` or `consolidate` alone: while the loop trains a task its weights keep their shapes.
    """

    def __init__(self, network: nn.Module, settings: S, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.wiring = Wiring({})
        self.axes: tuple[Axis, ...] = ()
        # Of each task that has been learned, by its head: units of each layer, and tensors that are its own.
        self.sizes: dict[str, dict[str, int]] = {}
        self.own: dict[str, Tensors] = {}
        self._current = ""
        # Layers whose output is the task's logits.
        self._ends: list[str] = []
        self._lr = 0.0
        # What may be moved of each parameter; None for all of everything. Made by `attach`.
        self._gates: Tensors | None = None
        self._base = {name: each.numel() for name, each in network.named_parameters()}

    @abstractmethod
    def _may_move(self) -> Tensors | None:
        """What the loop may move of each parameter in this task."""

    def begin(self, head: int, batches: Iterable[Batch]) -> None:
        inputs, _ = next(iter(batches))
        # Two of them, for BatchNorm cannot divide by the deviation of one.
        two = torch.cat([inputs[:2], inputs[:2]])[:2]
        found = find_wiring(self.network, two, head, exclude=self.exclude)
        self._current = str(head)
        self._ends = [name for name, place in found.places.items() if place.sources and name not in found.gated]
        if not self.wiring.places:
            self._wire(with_all_heads(found, self.exclude))
            if not self.axes:
                raise ValueError(
                    f"{self.name} has nothing to grow in {type(self.network).__name__}: it has no hidden layer whose "
                    "units reach other layers without being added to those of another"
                )

    def _wire(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self.axes = axes_of(self.network, wiring)

    @property
    def first_task(self) -> bool:
        """Whether the task at hand is the first."""
        return not self.sizes

    def now(self) -> dict[str, int]:
        """Units that each layer has."""
        return sizes_of(self.network, self.axes)

    def before(self) -> dict[str, int]:
        """Units that each layer had at the end of the task before."""
        return list(self.sizes.values())[-1]

    def optimizer(self, kind: Callable[..., Optimizer], lr: float) -> Optimizer:
        if kind is not SGD:
            raise ValueError(f"{self.name} trains parts of the network on the side, with SGD: set optimizer=sgd")
        return super().optimizer(kind, lr)

    def attach(self, optimizer: Optimizer) -> None:
        # The loop tells its rate here alone; what is trained on the side has the same.
        self._lr = optimizer.param_groups[0]["lr"]
        self._gates = self._may_move()

    def _with_head(self, gates: Tensors) -> Tensors:
        """Gates through which the task's head may be moved as well."""
        for name, gate in gates.items():
            if name.rpartition(".")[0] in self._ends:
                gate.fill_(True)
        return gates

    def _new_parts(self) -> Tensors:
        """What was added since the task before, and the task's head."""
        return self._with_head(outside(self.network, self.axes, self.before()))

    def step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> float:
        optimizer.zero_grad()
        loss = self.loss(batch, head, moment)
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                if parameter.grad is not None:
                    self._penalise(name, parameter, parameter.grad)
                    if self._gates is not None:
                        parameter.grad.mul_(self._gates[name])
        optimizer.step()
        return loss.item()

    def _penalise(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        """Add the gradient of penalties to that of the loss."""

    def _train(self, examples: Batch, size: int, epochs: int) -> None:
        """Train on the side, by the steps and at the first rate of the loop."""
        inputs, labels = examples
        optimizer = self.optimizer(SGD, self._lr)
        with self._only_what_moves():
            for epoch in range(epochs):
                lots = lots_of(torch.randperm(len(labels)), size)
                for number, rows in enumerate(lots):
                    share = number / len(lots)
                    moment = Moment(epoch, share, (epoch + share) / epochs)
                    self.step((inputs[rows], labels[rows]), int(self._current), moment, optimizer)

    @contextmanager
    def _only_what_moves(self) -> Iterator[None]:
        """In train mode, with no gradient of parameters that are closed as a whole: a head alone needs no more."""
        gates, mode = self._gates or {}, self.network.training
        closed = [each for name, each in self.network.named_parameters() if name in gates and not gates[name].any()]
        wanted = [each.requires_grad for each in closed]
        self.network.train()
        for each in closed:
            each.requires_grad_(False)
        try:
            yield
        finally:
            self.network.train(mode)
            for each, before in zip(closed, wanted, strict=True):
                each.requires_grad_(before)

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        """Put down what the task is answered with from now on."""
        self.sizes.pop(self._current, None)  # the last is the newest
        self.sizes[self._current] = self.now()
        norms = [name for name, each in self.network.named_modules() if isinstance(each, _BatchNorm)]
        state = self.network.state_dict()
        self.own[self._current] = {
            name: tensor.clone()
            for name, tensor in state.items()
            if name.rpartition(".")[0] in self._ends
            or (name.rpartition(".")[0] in norms and name not in dict(self.network.named_parameters()))
        }
        self._gates = None

    def logits(self, inputs: Tensor, head: int) -> Tensor:
        if str(head) == self._current or str(head) not in self.sizes:
            return super().logits(inputs, head)
        tensors = cut(self.network, self.axes, self.sizes[str(head)]) | self.own[str(head)]
        out: Tensor = functional_call(self.network, tensors, (inputs, head))
        return out

    def state_dict(self) -> dict[str, Any]:
        return {
            "wiring": self.wiring.plain(),
            "current": self._current,
            "ends": list(self._ends),
            "lr": self._lr,
            "now": self.now(),
            "sizes": {head: dict(sizes) for head, sizes in self.sizes.items()},
            "own": {head: dict(own) for head, own in self.own.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["wiring"] and not self.wiring.places:
            self._wire(Wiring.of(state["wiring"]))
        with torch.random.fork_rng(devices=[]):
            resize(self.network, self.axes, state["now"])  # the values are with the weights
        self._current, self._ends, self._lr = state["current"], list(state["ends"]), state["lr"]
        self.sizes = {head: dict(sizes) for head, sizes in state["sizes"].items()}
        # In memory as the network's own are: a product of other strides may round otherwise.
        last = has_channels_last(self.network)
        self.own = {
            head: {name: laid_out(tensor.clone(), last=last) for name, tensor in own.items()}
            for head, own in state["own"].items()
        }

    def bytes(self) -> dict[str, int]:
        return {"of each task": sum(each.nbytes for own in self.own.values() for each in own.values())}

    def capacity(self) -> float:
        """Body and heads of all tasks so far, each head with the units of its time; other heads as they were built."""
        parameters = dict(self.network.named_parameters())
        heads = [{name for name in own if name in parameters} for own in self.own.values()]
        learned = set().union(*heads)
        body = sum(
            self._base[name] if find_pattern(name, self.exclude) else each.numel()
            for name, each in parameters.items()
            if name not in learned
        )
        own = sum(self.own[head][name].numel() for head, names in zip(self.own, heads, strict=True) for name in names)
        return 100 * (body + own) / sum(self._base.values())


def gathered(batches: Iterable[Batch]) -> tuple[Batch, int]:
    """All examples of some batches, and how large a batch is."""
    inputs, labels = zip(*batches, strict=True)
    return (torch.cat(inputs), torch.cat(labels)), len(labels[0])


def lots_of(order: Tensor, size: int) -> tuple[Tensor, ...]:
    """Rows in equal lots of no fewer than a size: BatchNorm cannot normalise a lot of one that is left over."""
    return torch.tensor_split(order, max(1, len(order) // size))


def units_for(setting: int | dict[str, int], layer: str) -> int:
    """What a number of units by pattern is for one layer: that of the first pattern that fits its name, otherwise 0."""
    if not isinstance(setting, dict):
        return setting
    pattern = find_pattern(layer, setting)
    return 0 if pattern is None else setting[pattern]
