"""HAT (Serrà et al., ICML 2018): each task learns which units it uses, and those are closed to later tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from sgp.methods.method import Batch, Moment, count_parameters, sum_bytes
from sgp.methods.settings import HATFacts, HATSettings
from sgp.methods.wired import WiredMethod, pair_masks, wire_network
from sgp.networks.wiring import Wiring, count_units, mask_inputs, reshape_gate
from sgp.patterns import find_pattern


class HAT(HATFacts, WiredMethod[HATSettings]):
    """Hard attention to the task.

    With s the slope, e_l an embedding of the task for hidden layer l, and a_l^past the largest mask of earlier tasks:

        a_l = sigmoid(s e_l)                                    gates the layer's units; sgp.networks.wiring says where
        s = 1/smax + (smax - 1/smax) share of the epoch         in training; smax at test time
        loss = cross-entropy + c sum a_l (1 - a_l^past) / sum (1 - a_l^past)
        dW_ji := dW_ji (1 - min(a_j^past, a_i^past))            db_j := db_j (1 - a_j^past), also of a norm layer
        de := de smax/s (cosh(s e) + 1)/(cosh(e) + 1)           since s a (1 - a) in de nearly vanishes

    j is a unit and i an input of the layer. An input that several layers feed by addition counts with the largest of
    their masks, the network's own input with 1, and so does the output of a head that all tasks share. So what an old
    task's open units compute from its open units does not move, and the rest is multiplied by 0 in its forward pass.
    This requires plain SGD: momentum or weight decay would move weights without a gradient.

    A task is known by its head, or by its number if all tasks share one. Stored BatchNorm statistics are kept for each
    task, since later tasks must estimate the statistics of their own units.

    Attributes:
        past: Largest mask of all learned tasks by layer; empty before the first.
    """

    state_names = ("_current", "past", "own")

    def __init__(self, network: nn.Module, settings: HATSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.past: dict[str, Tensor] = {}
        self._embeddings = nn.ModuleDict()
        self._trained = nn.ModuleDict({"network": network, "embeddings": self._embeddings})
        # Of the running forward pass: slope, None at test time, and masks.
        self._slope: float | None = None
        self._masks: dict[str, Tensor] = {}
        network.register_forward_pre_hook(self._before_network, with_kwargs=True)

    @property
    def trained_module(self) -> nn.Module:
        return self._trained

    def begin_task(self, head: int, batches: Iterable[Batch]) -> None:
        if not self.wiring.places:
            self._set_wiring(wire_network(self.network, batches, head, self.exclude))
        if str(head) not in self._embeddings:
            self._add_embeddings(str(head), torch.randn)
        self._select_task(str(head))

    def _set_wiring(self, wiring: Wiring) -> None:
        self.wiring = wiring
        for name in wiring.gated:
            self.network.get_submodule(wiring.get_gate(name)).register_forward_hook(partial(self._gate, name))

    def _add_embeddings(self, head: str, create: Callable[[int], Tensor]) -> None:
        """Add the embeddings of a task, one for each gated layer."""
        layers = [self._get_layer(name) for name in self.wiring.gated]
        self._embeddings[head] = nn.ParameterList(create(count_units(layer)).to(layer.weight) for layer in layers)

    def _select_task(self, head: str) -> None:
        """Train the embeddings of one task and of no other."""
        self._current = head
        for name, group in self._embeddings.items():
            group.requires_grad_(name == head)

    def compute_masks(self, head: int | Tensor, slope: float | None = None) -> dict[str, Tensor]:
        """Return the mask of each gated layer: [units], or [n, units] for n heads.

        Args:
            head: Head, or one head for each example. A head that has learned nothing has no masks, and the network runs
                ungated.
            slope: Slope of the masks; None for the masks of tests.
        """
        if isinstance(head, Tensor):
            each = [self.compute_masks(int(one), slope) for one in head]
            return {name: torch.stack([masks[name] for masks in each]) for name in self.wiring.gated}
        if str(head) not in self._embeddings:
            return {}
        soft = [torch.sigmoid((slope or self.settings.smax) * e) for e in self._get_embeddings(str(head))]
        hard = slope is None and self.settings.test_masks == "hard"
        return dict(zip(self.wiring.gated, (mask.round() for mask in soft) if hard else soft, strict=True))

    def _get_embeddings(self, head: str) -> list[nn.Parameter]:
        return list(self._embeddings[head].parameters())

    def _before_network(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        head = args[1] if len(args) > 1 else next(iter(kwargs.values()), 0)
        self._masks = self.compute_masks(head, self._slope)

    def _gate(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output * reshape_gate(self._masks[name], output) if name in self._masks else output

    def compute_slope(self, moment: Moment) -> float:
        """Return the slope s of a training step."""
        smax = self.settings.smax
        return 1 / smax + (smax - 1 / smax) * moment.share_of_epoch

    def compute_loss(self, batch: Batch, head: int, moment: Moment) -> Tensor:
        inputs, labels = batch
        self._slope = self.compute_slope(moment)
        try:
            loss = F.cross_entropy(self.network(inputs, head), labels)
        finally:
            self._slope = None
        return loss + self.settings.sparsity * self._compute_sparsity(self._masks)

    def _compute_sparsity(self, masks: Mapping[str, Tensor]) -> Tensor | float:
        """Compute the share that these masks use of what earlier tasks left; 0 when nothing is left."""
        if not masks:  # a network without hidden layers
            return 0.0
        mask = torch.cat(list(masks.values()))
        left = 1 - torch.cat([self.past[name] for name in masks]) if self.past else torch.ones_like(mask)
        return (mask * left).sum() / left.sum().clamp(min=torch.finfo(left.dtype).tiny)

    def adjust_gradients(self, moment: Moment, optimizer: Optimizer) -> None:
        if self.past:
            self._gate_gradients()
        self._compensate_slope(self.compute_slope(moment))
        clip_grad_norm_(self.trained_module.parameters(), self.settings.clip_norm)

    def finish_step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> None:
        limit = self.settings.embedding_limit
        for embedding in self._get_embeddings(self._current):
            embedding.clamp_(-limit, limit)

    def _list_protected(self) -> list[str]:
        return [name for name in self.wiring.places if not find_pattern(name, self.exclude)]

    def _get_unit_mask(self, name: str) -> Tensor:
        """Return the largest mask of earlier tasks for a layer's units, [units]."""
        layer = self._get_layer(name)
        return self.past.get(name, layer.weight.new_ones(count_units(layer)))

    def _compute_closed(self, name: str) -> Tensor:
        """Return how closed each weight of a layer is: min(a_j^past, a_i^past), in the weight's shape or smaller."""
        layer = self._get_layer(name)
        inputs = mask_inputs(layer, [self.past[source] for source in self.wiring.places[name].sources])
        return pair_masks(layer, self._get_unit_mask(name), inputs)

    def _gate_gradients(self) -> None:
        for name in self._list_protected():
            layer, norm = self._get_layer(name), self.wiring.places[name].norm
            if layer.weight.grad is not None:
                layer.weight.grad.mul_(self._compute_closed(name).neg_().add_(1))
            biases = [layer.bias, *(self.network.get_submodule(norm).parameters() if norm else [])]
            for bias in biases:
                if bias is not None and bias.grad is not None:
                    bias.grad.mul_(1 - self._get_unit_mask(name))

    def _compensate_slope(self, slope: float) -> None:
        smax, limit = self.settings.smax, self.settings.cosh_limit
        for e in self._get_embeddings(self._current):
            if e.grad is not None:
                e.grad.mul_(smax / slope * (torch.cosh((slope * e).clamp(-limit, limit)) + 1) / (torch.cosh(e) + 1))

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        with torch.no_grad():
            masks = self.compute_masks(int(self._current))
            self.past = {name: torch.maximum(mask, self.past.get(name, mask)) for name, mask in masks.items()}
        if statistics := self._clone_norm_buffers():
            self.own[self._current] = statistics

    def state_dict(self) -> dict[str, Any]:
        return {"heads": list(self._embeddings), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for head in state["heads"]:
            if head not in self._embeddings:
                self._add_embeddings(head, torch.zeros)  # the values are with the weights
        self._select_task(self._current)

    def count_bytes(self) -> dict[str, int]:
        sizes = {"embeddings": sum_bytes(self._embeddings.parameters()), "masks": sum_bytes(self.past)}
        return sizes | ({"statistics": sum_bytes(self.own)} if self.own else {})

    def measure_free(self) -> dict[str, float]:
        names = self._list_protected()
        closed = {name: self._compute_closed(name).mean().item() if self.past else 0.0 for name in names}
        return {name: max(0.0, 1 - share) for name, share in closed.items()}

    def compute_capacity(self) -> float:
        return 100 * (1 + count_parameters(self._embeddings) / count_parameters(self.network))
