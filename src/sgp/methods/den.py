"""DEN (Yoon et al., ICLR 2018): a task retrains what it can use of the network, and adds units for what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from sgp.methods.growing import Growing, Tensors, gathered, units_for
from sgp.methods.method import Batch, Moment
from sgp.methods.settings.den import DENFacts, DENSettings
from sgp.networks.widen import cut, rearrange, widen
from sgp.networks.wiring import Layer, fed, units
from sgp.patterns import check_patterns


@dataclass(frozen=True)
class Phase:
    """What a step does beside descending the loss; the names are those of the settings."""

    l1: float = 0.0
    l2: float = 0.0
    drift: float = 0.0
    group_lasso: float = 0.0


class DEN(DENFacts, Growing[DENSettings]):
    """Dynamically expandable network.

    Every phase trains on cross-entropy + l2/2 |w|^2 and shrinks the weights that it trains: after each step
    |w| := max(|w| - l1, 0). The first task has one phase, in which everything is trained. Each later one has

    1. in `begin`, its head trained alone, with head_l1 in place of l1. Units are selected: those that the head has a
       weight for, those that they have one for, and so on down to the input;
    2. in the loop, selective retraining: the head and the weights between selected units are trained, with the penalty
       drift/2 |theta - theta_{t-1}|^2;
    3. in `consolidate`, if the training loss is above loss_limit, expansion: every layer gets new units, and they and
       the head are trained while nothing else moves. After each step the weights w_g into a new unit are scaled
       by max(0, 1 - group_lasso/|w_g|). Units that are left with nothing are removed;
    4. then the split of units whose weights moved by more than split_limit since the task before: the old unit gets its
       old weights back, and a new one has those of now. Old units go on hearing the old one, new units and the task's
       head hear the new one in its place. Then the whole network is trained, and the penalty
       drift/2 |theta - theta_{t-1}|^2 pulls old weights back to those of the task before.

    Every task is answered by the units of its time. What it retrained may still move the answers of earlier tasks.
    """

    def __init__(self, network: nn.Module, settings: DENSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        for name in ("expand_units", "split_units"):  # better now than after a task has been trained
            if isinstance(by_layer := getattr(settings, name), dict):
                check_patterns(network, by_layer, name)
        # Inside a task that is not the first: weights of the task before, and which units of each layer it retrains.
        self._anchor: Tensors = {}
        self.selected: Tensors = {}
        self._phase = Phase()

    def begin(self, head: int, batches: Iterable[Batch]) -> None:
        super().begin(head, batches)
        if self.first_task:
            return
        self._anchor = {
            name: each.detach().clone()
            for name, each in self.network.named_parameters()
            if name.rpartition(".")[0] not in self._ends
        }
        closed = {name: torch.zeros_like(each, dtype=torch.bool) for name, each in self.network.named_parameters()}
        examples, size = gathered(batches)
        phase = Phase(l1=self.settings.head_l1, l2=self.settings.l2)
        self._on_the_side(phase, self._with_head(closed), examples, size, self.settings.head_epochs)
        self.selected = self._reached()

    def _retraining(self) -> Phase:
        """Return the penalties under which a later task trains weights of earlier ones."""
        return Phase(l1=self.settings.l1, l2=self.settings.l2, drift=self.settings.drift)

    def _on_the_side(self, phase: Phase, gates: Tensors | None, examples: Batch, size: int, epochs: int) -> None:
        self._phase, self._gates = phase, gates
        self._train(examples, size, epochs)

    def _reached(self) -> Tensors:
        """Which units of each hidden layer have a path of weights to the head: [units] each."""
        found = {name: torch.zeros(units(self._layer(name)), dtype=torch.bool) for name in self.wiring.gated}
        open_ends = list(self._ends)
        while open_ends:
            name = open_ends.pop()
            layer = self._layer(name)
            connected = layer.weight.detach().abs() > self.settings.l1
            if connected.dim() == 4:  # by any pixel of the kernel
                connected = connected.any(dim=3).any(dim=2)
            hearing = found.get(name, torch.ones(len(connected), dtype=torch.bool))
            groups = layer.groups if isinstance(layer, nn.Conv2d) else 1
            # The units of a group hear the inputs of their group.
            heard = (connected & hearing.unsqueeze(1)).view(groups, -1, connected.shape[1]).any(dim=1).flatten()
            for source in self.wiring.places[name].sources:
                reached = heard.view(len(found[source]), -1).any(dim=1)
                if (reached & ~found[source]).any():
                    found[source] |= reached
                    open_ends.append(source)
        return found

    def _layer(self, name: str) -> Layer:
        layer = self.network.get_submodule(name)
        assert isinstance(layer, Layer)
        return layer

    def attach(self, optimizer: Optimizer) -> None:
        super().attach(optimizer)
        first = Phase(l1=self.settings.l1, l2=self.settings.l2)
        self._phase = first if self.first_task else self._retraining()

    def _may_move(self) -> Tensors | None:
        if self.first_task:
            return None
        gates = {name: torch.zeros_like(each, dtype=torch.bool) for name, each in self.network.named_parameters()}
        for name, chosen in self.selected.items():
            layer, place = self._layer(name), self.wiring.places[name]
            inputs = fed(layer, [self.selected[source] for source in place.sources]).bool()
            groups = layer.groups if isinstance(layer, nn.Conv2d) else 1
            between = (chosen.view(groups, -1, 1) & inputs.view(groups, 1, -1)).reshape(len(chosen), -1)
            gate = gates[f"{name}.weight"]
            gate |= between.reshape(*between.shape, *[1] * (gate.dim() - 2))
            for module in (name, place.norm):
                for key, _ in self.network.get_submodule(module).named_parameters() if module else ():
                    if gates[f"{module}.{key}"].dim() == 1:
                        gates[f"{module}.{key}"] |= chosen
        return self._with_head(gates)

    def _penalise(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        if self._phase.l2:
            gradient.add_(parameter, alpha=self._phase.l2)
        if self._phase.drift and name in self._anchor:
            anchor = self._anchor[name]
            # Entries of units that were added since then come after those of old units, and have no anchor.
            old = tuple(slice(size) for size in anchor.shape)
            gradient[old].add_(parameter[old] - anchor, alpha=self._phase.drift)

    def step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> float:
        loss = super().step(batch, head, moment, optimizer)
        with torch.no_grad():
            if self._phase.l1:
                self._shrink(self._phase.l1)
            if self._phase.group_lasso:
                self._shrink_new_units(self._phase.group_lasso)
        return loss

    def _shrink(self, by: float) -> None:
        """Every weight that the step could move; offsets stay."""
        for name, parameter in self.network.named_parameters():
            if parameter.grad is not None and parameter.dim() > 1:
                shrunk = F.softshrink(parameter, by)
                parameter.copy_(shrunk if self._gates is None else torch.where(self._gates[name], shrunk, parameter))

    def _new_units(self, name: str) -> list[Tensor]:
        """Of a layer, what its new units weigh their inputs with: [new units, ...] each, in the network's memory."""
        layer, start = self._layer(name), self.before()[name]
        return [each.detach()[start:] for each in (layer.weight, layer.bias) if each is not None]

    def _sizes_of_new_units(self, name: str) -> Tensor:
        """The norms of their weights, [new units]."""
        columns = [part.flatten(start_dim=1) if part.dim() > 1 else part.unsqueeze(1) for part in self._new_units(name)]
        norms: Tensor = torch.linalg.vector_norm(torch.cat(columns, dim=1), dim=1)
        return norms

    def _shrink_new_units(self, by: float) -> None:
        for name in self.now():
            norms = self._sizes_of_new_units(name)
            scale = 1 - by / norms.clamp(min=by)  # 0 for those that are smaller
            for part in self._new_units(name):
                part.mul_(scale.view(-1, *[1] * (part.dim() - 1)))

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        if not self.first_task:
            examples, size = gathered(batches)
            if self._loss(batches, log_likelihood) > self.settings.loss_limit:
                self._expand(examples, size)
            self._split(examples, size)
            self._anchor, self.selected = {}, {}
        self._phase = Phase()
        super().consolidate(batches, log_likelihood)

    @torch.no_grad()
    def _loss(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> float:
        """Mean over the task's training examples."""
        training = self.network.training
        self.network.eval()
        each = torch.cat([log_likelihood(batch) for batch in batches])
        self.network.train(training)
        return -each.mean().item()

    def _expand(self, examples: Batch, size: int) -> None:
        for name in self.now():
            widen(self.network, self.axes, name, units_for(self.settings.expand_units, name))
        if self.now() == self.before():
            return
        phase = Phase(l1=self.settings.l1, l2=self.settings.l2, group_lasso=self.settings.group_lasso)
        self._on_the_side(phase, self._new_parts(), examples, size, self.settings.expand_epochs)
        for name, count in self.now().items():
            start = self.before()[name]
            used = start + self._sizes_of_new_units(name).nonzero().flatten()
            if start + len(used) < count:
                rearrange(self.network, self.axes, name, torch.cat([torch.arange(start), used]))

    def drifts(self) -> Tensors:
        """How far the weights of each unit have moved in this task, [units] of each layer that can be widened."""
        tensors = cut(self.network, self.axes, self.before())
        weights = {name: f"{name}.weight" for name in self.before()}
        return {
            name: (tensors[key].detach() - self._anchor[key]).flatten(start_dim=1).norm(dim=1)
            for name, key in weights.items()
        }

    def _drifted(self, name: str, drifts: Tensor) -> Tensor:
        """Which units of a layer are split."""
        far = (drifts > self.settings.split_limit).nonzero().flatten()
        order = drifts[far].argsort(descending=self.settings.split_choice == "most", stable=True)
        return far[order[: units_for(self.settings.split_units, name)]]

    def _split(self, examples: Batch, size: int) -> None:
        chosen = {name: self._drifted(name, drifts) for name, drifts in self.drifts().items()}
        chosen = {name: numbers for name, numbers in chosen.items() if len(numbers)}
        if not chosen:
            return
        counts = self.now()
        for name, numbers in chosen.items():
            rearrange(self.network, self.axes, name, torch.cat([torch.arange(counts[name]), numbers]))
        with torch.no_grad():
            self._share_out(chosen, counts)
            self._take_back(chosen)
        # Without gates: other heads have no gradient, and everything else is trained.
        self._on_the_side(self._retraining(), None, examples, size, self.settings.split_epochs)

    def _share_out(self, chosen: Mapping[str, Tensor], counts: Mapping[str, int]) -> None:
        """Of a unit and its copy, old units hear the one and what is new hears the other."""
        parameters = dict(self.network.named_parameters())
        for axis in self.axes:
            if axis.dim == 0 or axis.layer not in chosen:
                continue
            weight, name = parameters[axis.tensor], axis.tensor.rpartition(".")[0]
            # The layer's rows from here on are new.
            start = 0 if name in self._ends else self.before().get(name, len(weight))
            entries = chosen[axis.layer].unsqueeze(1) * axis.each + torch.arange(axis.each)
            weight[:start, counts[axis.layer] * axis.each :] = 0
            weight[start:, entries.flatten()] = 0

    def _take_back(self, chosen: Mapping[str, Tensor]) -> None:
        """Give split units the weights of the task before; they did not hear units that are new."""
        parameters = dict(self.network.named_parameters())
        for axis in self.axes:
            if axis.dim or axis.layer not in chosen or axis.tensor not in parameters:
                continue
            now, old, numbers = parameters[axis.tensor], self._anchor[axis.tensor], chosen[axis.layer]
            now[numbers] = 0
            if now.dim() == 1:
                now[numbers] = old[numbers]
            else:
                now[numbers, : old.shape[1]] = old[numbers]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"anchor": dict(self._anchor), "selected": dict(self.selected)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._anchor = {name: tensor.clone() for name, tensor in state["anchor"].items()}
        self.selected = {name: mask.clone() for name, mask in state["selected"].items()}

    def bytes(self) -> dict[str, int]:
        held = [*self._anchor.values(), *self.selected.values()]
        return super().bytes() | {"weights before the task": sum(each.nbytes for each in held)}
