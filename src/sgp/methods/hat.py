"""HAT (Serrà et al., ICML 2018): each task learns which units it uses, and those are closed to later tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from sgp.methods.method import Batch, Method, Moment
from sgp.methods.settings.hat import HATFacts, HATSettings
from sgp.networks.wiring import Layer, Wiring, as_gate, fed, find_wiring, units
from sgp.patterns import find_pattern


class HAT(HATFacts, Method[HATSettings]):
    """Hard attention to the task.

    With s the slope, e_l an embedding of the task for hidden layer l, and a_l^past the largest mask of earlier tasks:

        a_l = sigmoid(s e_l)                                    gates the layer's units; sgp.networks.wiring says where
        s = 1/smax + (smax - 1/smax) share of the epoch         in training; smax at test
        loss = cross-entropy + c sum a_l (1 - a_l^past) / sum (1 - a_l^past)
        dW_ji := dW_ji (1 - min(a_j^past, a_i^past))            db_j := db_j (1 - a_j^past), also of a norm layer
        de := de smax/s (cosh(s e) + 1)/(cosh(e) + 1)           since s a (1 - a) in de all but vanishes

    j is a unit and i an input of the layer. An input that several layers feed by addition counts with the largest of
    their masks, the network's own input with 1, and so does the output of a head that all tasks share. So what an old
    task's open units compute from its open units does not move, and the rest is multiplied by 0 in its forward pass.
    That takes plain SGD: momentum or decay would move weights without a gradient.

    A task is known by its head, or by its number where all tasks share one. Stored statistics of BatchNorm are kept for
    each task, since later tasks must estimate those of their own units.
    """

    def __init__(self, network: nn.Module, settings: HATSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.wiring = Wiring({})
        # Largest mask of all tasks that have been learned; empty before the first.
        self.past: dict[str, Tensor] = {}
        self._embeddings = nn.ModuleDict()
        self._trained = nn.ModuleDict({"network": network, "embeddings": self._embeddings})
        self._current = ""
        self._statistics: dict[str, dict[str, Tensor]] = {}
        # Of the forward pass that runs: slope, None at test, and masks.
        self._slope: float | None = None
        self._masks: dict[str, Tensor] = {}
        network.register_forward_pre_hook(self._before_network, with_kwargs=True)

    @property
    def trained(self) -> nn.Module:
        return self._trained

    def begin(self, head: int, batches: Iterable[Batch]) -> None:
        if not self.wiring.places:
            inputs, _ = next(iter(batches))
            # Two of them, for BatchNorm cannot divide by the deviation of one.
            two = torch.cat([inputs[:2], inputs[:2]])[:2]
            self._wire(find_wiring(self.network, two, head, exclude=self.exclude))
        if str(head) not in self._embeddings:
            self._add(str(head), torch.randn)
        self._take_up(str(head))

    def _wire(self, wiring: Wiring) -> None:
        """Set the gates."""
        self.wiring = wiring
        for name in wiring.gated:
            self.network.get_submodule(wiring.gate_of(name)).register_forward_hook(partial(self._gate, name))

    def _add(self, head: str, values: Callable[[int], Tensor]) -> None:
        """Embeddings of a task, one for each gated layer."""
        self._embeddings[head] = nn.ParameterList(
            values(units(self._layer(name))).to(self._layer(name).weight) for name in self.wiring.gated
        )

    def _take_up(self, head: str) -> None:
        """Train the embeddings of one task and of no other."""
        self._current = head
        for name, group in self._embeddings.items():
            group.requires_grad_(name == head)

    def _layer(self, name: str) -> Layer:
        layer = self.network.get_submodule(name)
        assert isinstance(layer, Layer)
        return layer

    def masks(self, head: int | Tensor, slope: float | None = None) -> dict[str, Tensor]:
        """Of each gated layer: [units], or [n, units] for n heads; those of tests without a slope.

        A head that has learned nothing has none, and the network answers ungated.
        """
        if isinstance(head, Tensor):
            each = [self.masks(int(one), slope) for one in head]
            return {name: torch.stack([masks[name] for masks in each]) for name in self.wiring.gated}
        if str(head) not in self._embeddings:
            return {}
        soft = [torch.sigmoid((slope or self.settings.smax) * e) for e in self._of(str(head))]
        hard = slope is None and self.settings.test_masks == "hard"
        return dict(zip(self.wiring.gated, (mask.round() for mask in soft) if hard else soft, strict=True))

    def _of(self, head: str) -> list[nn.Parameter]:
        return list(self._embeddings[head].parameters())

    def _before_network(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        head = args[1] if len(args) > 1 else next(iter(kwargs.values()), 0)
        self._masks = self.masks(head, self._slope)

    def _gate(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output * as_gate(self._masks[name], output) if name in self._masks else output

    def slope(self, moment: Moment) -> float:
        """Of a training step."""
        smax = self.settings.smax
        return 1 / smax + (smax - 1 / smax) * moment.share_of_epoch

    def loss(self, batch: Batch, head: int, moment: Moment) -> Tensor:
        inputs, labels = batch
        self._slope = self.slope(moment)
        try:
            loss = F.cross_entropy(self.network(inputs, head), labels)
        finally:
            self._slope = None
        return loss + self.settings.sparsity * self._sparsity(self._masks)

    def _sparsity(self, masks: Mapping[str, Tensor]) -> Tensor | float:
        """Share of what earlier tasks left that these masks take; 0 when nothing is left."""
        if not masks:  # a network without hidden layers
            return 0.0
        mask = torch.cat(list(masks.values()))
        left = 1 - torch.cat([self.past[name] for name in masks]) if self.past else torch.ones_like(mask)
        return (mask * left).sum() / left.sum().clamp(min=torch.finfo(left.dtype).tiny)

    def step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> float:
        optimizer.zero_grad()
        loss = self.loss(batch, head, moment)
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            if self.past:
                self._gate_gradients()
            self._compensate(head, self.slope(moment))
            clip_grad_norm_(self.trained.parameters(), self.settings.clip_norm)
        optimizer.step()
        limit = self.settings.embedding_limit
        with torch.no_grad():
            for embedding in self._of(str(head)):
                embedding.clamp_(-limit, limit)
        return loss.item()

    def _protected(self) -> list[str]:
        return [name for name in self.wiring.places if not find_pattern(name, self.exclude)]

    def _sides(self, name: str) -> tuple[Tensor, Tensor]:
        """Of the tasks so far: the masks of a layer's units [units] and of its inputs [inputs]."""
        layer = self._layer(name)
        ours = self.past.get(name, layer.weight.new_ones(units(layer)))
        return ours, fed(layer, [self.past[source] for source in self.wiring.places[name].sources])

    def _closed(self, name: str) -> Tensor:
        """How closed each weight of a layer is: min(a_j^past, a_i^past), [units, inputs of a unit]."""
        layer, (ours, theirs) = self._layer(name), self._sides(name)
        groups = layer.groups if isinstance(layer, nn.Conv2d) else 1
        # The units of a group see the inputs of their group.
        return torch.minimum(ours.view(groups, -1, 1), theirs.view(groups, 1, -1)).reshape(len(ours), -1)

    def _gate_gradients(self) -> None:
        for name in self._protected():
            layer, norm = self._layer(name), self.wiring.places[name].norm
            if layer.weight.grad is not None:
                gate = self._closed(name).neg_().add_(1)
                layer.weight.grad.mul_(gate.reshape(*gate.shape, *[1] * (layer.weight.dim() - 2)))
            ours = self._sides(name)[0]
            offsets = [layer.bias, *(self.network.get_submodule(norm).parameters() if norm else [])]
            for offset in offsets:
                if offset is not None and offset.grad is not None:
                    offset.grad.mul_(1 - ours)

    def _compensate(self, head: int, slope: float) -> None:
        smax, limit = self.settings.smax, self.settings.cosh_limit
        for e in self._of(str(head)):
            if e.grad is not None:
                e.grad.mul_(smax / slope * (torch.cosh((slope * e).clamp(-limit, limit)) + 1) / (torch.cosh(e) + 1))

    def logits(self, inputs: Tensor, head: int) -> Tensor:
        # Those of the task that is being learned are the network's own.
        own = {} if str(head) == self._current else self._statistics.get(str(head), {})
        out: Tensor = functional_call(self.network, own, (inputs, head)) if own else self.network(inputs, head)
        return out

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        with torch.no_grad():
            masks = self.masks(int(self._current))
            self.past = {name: torch.maximum(mask, self.past.get(name, mask)) for name, mask in masks.items()}
        statistics = {
            f"{name}.{key}": buffer.clone()
            for name, module in self.network.named_modules()
            if isinstance(module, _BatchNorm)
            for key, buffer in module.named_buffers(recurse=False)
        }
        if statistics:
            self._statistics[self._current] = statistics

    def state_dict(self) -> dict[str, Any]:
        return {
            "wiring": self.wiring.plain(),
            "heads": list(self._embeddings),
            "current": self._current,
            "past": dict(self.past),
            "statistics": {head: dict(own) for head, own in self._statistics.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["wiring"] and not self.wiring.places:
            self._wire(Wiring.of(state["wiring"]))
        for head in state["heads"]:
            if head not in self._embeddings:
                self._add(head, torch.zeros)  # their values are with the weights
        self._take_up(state["current"])
        self.past = {name: mask.clone() for name, mask in state["past"].items()}
        self._statistics = {head: dict(own) for head, own in state["statistics"].items()}

    def bytes(self) -> dict[str, int]:
        statistics = sum(each.nbytes for own in self._statistics.values() for each in own.values())
        return {
            "embeddings": sum(each.nbytes for each in self._embeddings.parameters()),
            "masks": sum(mask.nbytes for mask in self.past.values()),
        } | ({"statistics": statistics} if statistics else {})

    def free(self) -> dict[str, float]:
        closed = {name: self._closed(name).mean().item() if self.past else 0.0 for name in self._protected()}
        return {name: max(0.0, 1 - share) for name, share in closed.items()}

    def capacity(self) -> float:
        own = sum(each.numel() for each in self._embeddings.parameters())
        return 100 * (1 + own / sum(each.numel() for each in self.network.parameters()))
