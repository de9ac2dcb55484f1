"""DEN (Yoon et al., ICLR 2018): a task retrains the useful part of the network, and adds units for what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from sgp.methods.growing import Growing, gather_examples
from sgp.methods.layer_settings import check_setting, get_value
from sgp.methods.method import Batch, Moment, clone_tensors, sum_bytes, use_mode
from sgp.methods.settings import DENFacts, DENSettings
from sgp.methods.wired import Tensors, count_groups, pair_masks
from sgp.networks.widen import rearrange, slice_units, widen
from sgp.networks.wiring import count_units, mask_inputs


@dataclass(frozen=True)
class Phase:
    """Penalties and shrinkage of the steps of a phase, under the names of the settings."""

    l1: float = 0.0
    l2: float = 0.0
    drift: float = 0.0
    group_lasso: float = 0.0


class DEN(DENFacts, Growing[DENSettings]):
    """Dynamically expandable network.

    Every phase trains on cross-entropy + l2/2 |w|^2 and shrinks the weights that it trains: after each step
    |w| := max(|w| - l1, 0). The first task has one phase, in which everything is trained. Each later one has

    1. in `begin_task`, training of its head alone, with head_l1 in place of l1. Units are selected: those that the head
       has a weight for, those that these units have a weight for, and so on down to the input;
    2. in the trainer's loop, selective retraining: the head and the weights between selected units are trained, with
       the penalty drift/2 |theta - theta_{t-1}|^2;
    3. in `consolidate`, if the training loss is above loss_limit, expansion: every layer gets new units, and they and
       the head are trained while nothing else moves. After each step the weights w_g into a new unit are scaled
       by max(0, 1 - group_lasso/|w_g|). Units whose weights are all 0 are removed;
    4. then the split of units whose weights moved by more than split_limit since the previous task: the old unit gets
       its old weights back, and a new unit has the current ones. Old units keep reading the old one; new units and the
       task's head read the new one in its place. Then the whole network is trained, and the penalty
       drift/2 |theta - theta_{t-1}|^2 pulls old weights back to those of the previous task.

    Every task uses the units of its time. The weights that it retrained may still move the outputs of earlier tasks.
    """

    state_names = (*Growing.state_names, "_anchor", "selected")

    def __init__(self, network: nn.Module, settings: DENSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        for name in ("expand_units", "split_units"):
            check_setting(network, name, getattr(settings, name))
        # In a task that is not the first: weights of the previous task, and which units of each layer are retrained.
        self._anchor: Tensors = {}
        self.selected: Tensors = {}
        self._phase = Phase()

    def begin_task(self, head: int, batches: Iterable[Batch]) -> None:
        super().begin_task(head, batches)
        if self.is_first_task:
            return
        parameters = self.network.named_parameters()
        self._anchor = clone_tensors((n, each) for n, each in parameters if n.rpartition(".")[0] not in self._ends)
        examples, size = gather_examples(batches)
        phase = Phase(l1=self.settings.head_l1, l2=self.settings.l2)
        self._train_phase(phase, self._open_head(self._close_gates()), examples, size, self.settings.head_epochs)
        self.selected = self._select_units()

    def _get_retraining(self) -> Phase:
        """Return the penalties under which a later task trains weights of earlier ones."""
        return Phase(l1=self.settings.l1, l2=self.settings.l2, drift=self.settings.drift)

    def _train_phase(self, phase: Phase, gates: Tensors | None, examples: Batch, size: int, epochs: int) -> None:
        self._phase, self._gates = phase, gates
        self._train(examples, size, epochs)

    def _select_units(self) -> Tensors:
        """Return which units of each hidden layer have a path of weights to the head: [units] each."""
        found = {name: torch.zeros(count_units(self._get_layer(name)), dtype=torch.bool) for name in self.wiring.gated}
        open_ends = list(self._ends)
        while open_ends:
            name = open_ends.pop()
            layer = self._get_layer(name)
            connected = layer.weight.detach().abs() > self.settings.l1
            if connected.dim() == 4:  # by any pixel of the kernel
                connected = connected.any(dim=3).any(dim=2)
            reading = found.get(name, torch.ones(len(connected), dtype=torch.bool))
            # The units of a group read the inputs of their group.
            read = (connected & reading.unsqueeze(1)).view(count_groups(layer), -1, connected.shape[1]).any(dim=1)
            for source in self.wiring.places[name].sources:
                reached = read.view(len(found[source]), -1).any(dim=1)
                if (reached & ~found[source]).any():
                    found[source] |= reached
                    open_ends.append(source)
        return found

    def attach(self, optimizer: Optimizer) -> None:
        super().attach(optimizer)
        first = Phase(l1=self.settings.l1, l2=self.settings.l2)
        self._phase = first if self.is_first_task else self._get_retraining()

    def _build_gates(self) -> Tensors | None:
        if self.is_first_task:
            return None
        gates = self._close_gates()
        for name, chosen in self.selected.items():
            layer, place = self._get_layer(name), self.wiring.places[name]
            inputs = mask_inputs(layer, [self.selected[source] for source in place.sources]).bool()
            gates[f"{name}.weight"] |= pair_masks(layer, chosen, inputs)
            for module in (name, place.norm):
                for key, _ in self.network.get_submodule(module).named_parameters() if module else ():
                    if gates[f"{module}.{key}"].dim() == 1:
                        gates[f"{module}.{key}"] |= chosen
        return self._open_head(gates)

    def _add_penalties(self, name: str, parameter: Tensor, gradient: Tensor) -> None:
        if self._phase.l2:
            gradient.add_(parameter, alpha=self._phase.l2)
        if self._phase.drift and name in self._anchor:
            anchor = self._anchor[name]
            # Entries of units that were added since come after those of old units, and have no anchor.
            old = tuple(slice(size) for size in anchor.shape)
            gradient[old].add_(parameter[old] - anchor, alpha=self._phase.drift)

    def finish_step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> None:
        if self._phase.l1:
            self._shrink_weights(self._phase.l1)
        if self._phase.group_lasso:
            self._shrink_new_units(self._phase.group_lasso)

    def _shrink_weights(self, amount: float) -> None:
        """Shrink every weight that the step could change; biases stay."""
        for name, parameter in self.network.named_parameters():
            if parameter.grad is not None and parameter.dim() > 1:
                shrunk = F.softshrink(parameter, amount)
                parameter.copy_(shrunk if self._gates is None else torch.where(self._gates[name], shrunk, parameter))

    def _get_new_units(self, name: str) -> list[Tensor]:
        """Return views of the weight and bias of a layer's new units, [new units, ...] each."""
        layer, start = self._get_layer(name), self.count_old_units()[name]
        return [each.detach()[start:] for each in (layer.weight, layer.bias) if each is not None]

    def _measure_new_units(self, name: str) -> Tensor:
        """Return the norm of each new unit's weights, [new units]."""
        parts = self._get_new_units(name)
        columns = [part.flatten(start_dim=1) if part.dim() > 1 else part.unsqueeze(1) for part in parts]
        norms: Tensor = torch.linalg.vector_norm(torch.cat(columns, dim=1), dim=1)
        return norms

    def _shrink_new_units(self, amount: float) -> None:
        for name in self.count_units():
            norms = self._measure_new_units(name)
            scale = 1 - amount / norms.clamp(min=amount)  # 0 for smaller norms
            for part in self._get_new_units(name):
                part.mul_(scale.view(-1, *[1] * (part.dim() - 1)))

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        if not self.is_first_task:
            examples, size = gather_examples(batches)
            if self._compute_mean_loss(batches, log_likelihood) > self.settings.loss_limit:
                self._expand(examples, size)
            self._split_units(examples, size)
            self._anchor, self.selected = {}, {}
        self._phase = Phase()
        super().consolidate(batches, log_likelihood)

    @torch.no_grad()
    def _compute_mean_loss(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> float:
        with use_mode(self.network, training=False):
            return -torch.cat([log_likelihood(batch) for batch in batches]).mean().item()

    def _expand(self, examples: Batch, size: int) -> None:
        for name in self.count_units():
            widen(self.network, self.axes, name, get_value("expand_units", self.settings.expand_units, name, default=0))
        if self.count_units() == self.count_old_units():
            return
        phase = Phase(l1=self.settings.l1, l2=self.settings.l2, group_lasso=self.settings.group_lasso)
        self._train_phase(phase, self._open_new_parts(), examples, size, self.settings.expand_epochs)
        for name, count in self.count_units().items():
            start = self.count_old_units()[name]
            used = start + self._measure_new_units(name).nonzero().flatten()
            if start + len(used) < count:
                rearrange(self.network, self.axes, name, torch.cat([torch.arange(start), used]))

    def measure_drifts(self) -> Tensors:
        """Return how far each unit's weights have moved in this task, [units] of each layer that can grow."""
        tensors = slice_units(self.network, self.axes, self.count_old_units())
        weights = {name: f"{name}.weight" for name in self.count_old_units()}
        return {
            name: (tensors[key].detach() - self._anchor[key]).flatten(start_dim=1).norm(dim=1)
            for name, key in weights.items()
        }

    def _choose_drifted(self, name: str, drifts: Tensor) -> Tensor:
        """Return the numbers of a layer's units that are split."""
        far = (drifts > self.settings.split_limit).nonzero().flatten()
        order = drifts[far].argsort(descending=self.settings.split_choice == "most", stable=True)
        return far[order[: get_value("split_units", self.settings.split_units, name, default=0)]]

    def _split_units(self, examples: Batch, size: int) -> None:
        chosen = {name: self._choose_drifted(name, drifts) for name, drifts in self.measure_drifts().items()}
        chosen = {name: numbers for name, numbers in chosen.items() if len(numbers)}
        if not chosen:
            return
        counts = self.count_units()
        for name, numbers in chosen.items():
            rearrange(self.network, self.axes, name, torch.cat([torch.arange(counts[name]), numbers]))
        with torch.no_grad():
            self._divide_readers(chosen, counts)
            self._restore_split_units(chosen)
        # Without gates: other heads have no gradient, and everything else is trained.
        self._train_phase(self._get_retraining(), None, examples, size, self.settings.split_epochs)

    def _divide_readers(self, chosen: Mapping[str, Tensor], counts: Mapping[str, int]) -> None:
        """Let old units read a split unit, and new units and the task's head its copy."""
        parameters = dict(self.network.named_parameters())
        for axis in self.axes:
            if axis.dim == 0 or axis.layer not in chosen:
                continue
            weight, name = parameters[axis.tensor], axis.tensor.rpartition(".")[0]
            # The layer's rows from here on are new.
            start = 0 if name in self._ends else self.count_old_units().get(name, len(weight))
            entries = chosen[axis.layer].unsqueeze(1) * axis.each + torch.arange(axis.each)
            weight[:start, counts[axis.layer] * axis.each :] = 0
            weight[start:, entries.flatten()] = 0

    def _restore_split_units(self, chosen: Mapping[str, Tensor]) -> None:
        """Give split units the weights of the previous task, and 0 for inputs from new units."""
        parameters = dict(self.network.named_parameters())
        for axis in self.axes:
            if axis.dim or axis.layer not in chosen or axis.tensor not in parameters:
                continue
            current, old, numbers = parameters[axis.tensor], self._anchor[axis.tensor], chosen[axis.layer]
            current[numbers] = 0
            if current.dim() == 1:
                current[numbers] = old[numbers]
            else:
                current[numbers, : old.shape[1]] = old[numbers]

    def count_bytes(self) -> dict[str, int]:
        return super().count_bytes() | {"weights before the task": sum_bytes([self._anchor, self.selected])}
