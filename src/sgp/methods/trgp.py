"""TRGP (Lin, Yang, Fan & Zhang, ICLR 2022): GPM whose weights are scaled where an old task is trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgp.methods.gpm import GPM, refuse_embeddings
from sgp.methods.method import Batch, Moment
from sgp.methods.settings.gpm import GPMSettings
from sgp.methods.settings.trgp import TRGPFacts, TRGPSettings
from sgp.patterns import check_patterns, find_pattern
from sgp.projection import GradientMemory, Subspace
from sgp.projection.gram import InputGram
from sgp.projection.layer import ProtectedLayer
from sgp.projection.scan import ScanRules, scan_model
from sgp.projection.subspace import Bases, Choice, compute_coefficients, find_minimal_rank


@dataclass(frozen=True)
class Space:
    """The space of one task in one layer: some of the layer's bases, which only ever become more.

    Attributes:
        chosen: which bases, of those that there were when the task was taken in. [groups, k] bool
        outside: directions that the memory does not hold. [groups, d, 0 or 1]
    """

    chosen: Tensor
    outside: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored."""
        return self.chosen.nbytes + self.outside.nbytes

    def basis(self, memory: Subspace) -> Tensor:
        """S, [groups, d, k]; where groups differ in rank, the rest is zero columns."""
        counts = self.chosen.sum(-1)
        order = self.chosen.int().argsort(dim=-1, descending=True, stable=True)[:, : int(counts.max())]
        kept = torch.arange(order.shape[1]) < counts.unsqueeze(-1)
        columns = memory.basis.gather(2, order.unsqueeze(1).expand(-1, memory.dimension, -1)) * kept.unsqueeze(1)
        return torch.cat([columns, self.outside], dim=-1)


class UnionMemory(GradientMemory):
    """A gradient memory in which a task's space is the smallest set of bases, old and new, that reaches the threshold.

    Of old bases and the directions that they leave over, those with the most energy are taken first. New ones among
    them join the memory. So an old basis counts only if it is among the strongest, and a task may add more than in GPM.

    Attributes:
        without_strongest: whether the strongest new direction of a later task is left out of the memory.
        spaces: the space of the last task in each layer.
    """

    without_strongest = False

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._space_of: dict[int, tuple[Subspace, Space]] = {}

    @property
    def spaces(self) -> dict[str, Space]:
        found = {name: self._space_of.get(id(subspace)) for name, subspace in self.subspaces.items()}
        return {name: pair[1] for name, pair in found.items() if pair is not None}

    def forget_spaces(self) -> None:
        """They have been taken over."""
        self._space_of.clear()

    def grow_bases(self, bases: Bases, gram: InputGram, threshold: float, choose: Choice | None = None) -> Bases:
        assert isinstance(bases, Subspace)
        taken = torch.zeros(bases.basis.shape[0], bases.basis.shape[2], dtype=torch.bool)

        def choose_strongest(old: Tensor, new: Tensor, total: Tensor, threshold: float) -> Tensor:
            energies, order = torch.cat([old, new], dim=-1).sort(dim=-1, descending=True, stable=True)
            count = find_minimal_rank(energies, total, threshold)
            first = torch.arange(order.shape[-1]) < count.unsqueeze(-1)
            members = torch.zeros_like(first).scatter(-1, order, first)
            taken.copy_(members[:, : old.shape[-1]])
            return members[:, old.shape[-1] :].sum(-1)

        grown = super().grow_bases(bases, gram, threshold, choose or choose_strongest)
        assert isinstance(grown, Subspace)
        outside = grown.basis[..., :0]
        if self.without_strongest:
            grown, outside = _without_first_new(bases, grown)
        column = torch.arange(grown.basis.shape[2])
        new = (column >= bases.rank.unsqueeze(-1)) & (column < grown.rank.unsqueeze(-1))
        old = F.pad(taken, (0, len(column) - taken.shape[1])) & (column < bases.rank.unsqueeze(-1))
        self._space_of[id(grown)] = (grown, Space(old | new, outside))
        return grown


def _without_first_new(start: Subspace, grown: Subspace) -> tuple[Subspace, Tensor]:
    """A grown subspace without the strongest new basis of each group that had bases before; and those bases."""
    column = torch.arange(grown.basis.shape[2])
    has_it = (grown.rank > start.rank) & (start.rank > 0)
    is_it = (column == start.rank.unsqueeze(-1)) & has_it.unsqueeze(-1)
    outside = (grown.basis * is_it.unsqueeze(1)).sum(-1, keepdim=True)
    rank = grown.rank - has_it.long()
    order = is_it.int().argsort(dim=-1, stable=True)[:, : int(rank.max())]
    kept = torch.arange(order.shape[1]) < rank.unsqueeze(-1)
    basis = grown.basis.gather(2, order.unsqueeze(1).expand(-1, grown.dimension, -1)) * kept.unsqueeze(1)
    importance = grown.importance.gather(1, order) * kept
    return Subspace(basis, importance, rank), outside[..., : int(has_it.any())]


@dataclass(frozen=True)
class Region:
    """An old task that a layer trusts.

    Attributes:
        head: of the old task.
        space: S of the old task. [groups, d, k]
        scale: Q - I. [groups, k, k]
        inside: W S, if no step changes it. [groups, out, k]
    """

    head: str
    space: Tensor
    scale: Tensor
    inside: Tensor | None = None


@dataclass(frozen=True)
class Learned:
    """What is kept of a task.

    Attributes:
        spaces: its space in each layer.
        scales: Q - I by layer and head of the trusted task.
    """

    spaces: dict[str, Space] = field(default_factory=dict)
    scales: dict[str, dict[str, Tensor]] = field(default_factory=dict)


class TRGP(TRGPFacts, GPM):
    """A gradient memory, and weights that each task scales inside the spaces of old tasks that it trusts.

    Before a task, let G be the gradient of its loss with respect to a layer's weight. The layer trusts the old tasks s
    with the largest |G S_s|, up to two of them, of which |G S_s| > epsilon |G|. The task then uses

        W_eff = W + sum_s W S_s (Q_s - I) S_s^T,

    with Q_s learned from I on beside W and kept for the task. W is trained as in GPM.

    No step of GPM changes W S, since the memory holds S; and what a gradient of W would gain through the second term
    lies in the span of S, which the memory takes away. So W S is computed once a task, as a constant. A linear layer
    adds ((x S)(Q - I)^T)(W S)^T to its output, which costs as little as the batch is small and leaves the gradient of W
    to the layer's input alone; other layers run with W_eff. Where the memory lacks a direction of S, as with
    `appended="all-but-strongest"`, W S is computed anew in each step and has its part in the gradient.
    """

    Memory = UnionMemory
    settings: TRGPSettings
    memory: UnionMemory

    def __init__(self, network: nn.Module, settings: TRGPSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.memory.without_strongest = settings.appended == "all-but-strongest"
        scan = scan_model(network, ScanRules(tuple(exclude), settings.bias, settings.norms))
        refuse_embeddings(self.name, scan)
        unscaled = [settings.unscaled] if settings.unscaled else []
        check_patterns(network, unscaled, "unscaled", scan.layers)
        # A weight that meets inputs on both sides has no one space.
        self._layers = {
            name: layer
            for name, layer in scan.layers.items()
            if not layer.is_two_sided and not find_pattern(name, unscaled)
        }
        self._first_layer = next(iter(scan.layers))
        self._scales = nn.ParameterDict()
        self._trained = nn.ModuleDict({"network": network, "scales": self._scales})
        self._head: str | None = None
        self._regions: dict[str, list[Region]] = {}
        # By head, in the order in which they were learned.
        self._learned: dict[str, Learned] = {}

    @staticmethod
    def _rest(settings: GPMSettings) -> Literal["freeze", "free"]:
        assert isinstance(settings, TRGPSettings)
        return settings.norms

    @property
    def trained(self) -> nn.Module:
        return self._trained

    def begin(self, head: int, batches: Iterable[Batch]) -> None:
        self._head = str(head)
        trusted = self._choose_tasks(head, batches) if self._learned and self.settings.trust_tasks else {}
        self._open(trusted)

    def loss(self, batch: Batch, head: int, moment: Moment) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.logits(inputs, head), labels)

    def logits(self, inputs: Tensor, head: int) -> Tensor:
        return self._run(inputs, head, self._regions if str(head) == self._head else self._regions_of(str(head)))

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        assert self._head is not None
        regions = self._regions
        if self.settings.representation == "plain":
            self._regions = {}  # log_likelihood runs `logits`, which scales the weights of these layers
        try:
            super().consolidate(batches, log_likelihood)
        finally:
            self._regions = regions
        scales = {
            layer: {region.head: region.scale.detach().clone() for region in own} for layer, own in regions.items()
        }
        self._learned[self._head] = Learned(self.memory.spaces, scales)
        self.memory.forget_spaces()
        self._head = None
        self._open({})

    def effective_weight(self, layer: str, head: int) -> tuple[Tensor, Tensor | None]:
        """W_eff of a layer for a task as matrices [groups, out, inputs], and the bias if it is protected with W."""
        own = self._layers[layer]
        regions = self._regions if str(head) == self._head else self._regions_of(str(head))
        weight, bias = self._matrices(own)
        change, bias_change = self._change(own, regions.get(layer, []))
        return weight + change, None if bias is None or bias_change is None else bias + bias_change

    def state_dict(self) -> dict[str, Any]:
        return {
            "memory": super().state_dict(),
            "head": self._head,
            "regions": {
                layer: {region.head: {} if region.inside is None else {"inside": region.inside} for region in regions}
                for layer, regions in self._regions.items()
            },
            "learned": {
                head: {
                    "spaces": {
                        layer: {"chosen": space.chosen, "outside": space.outside}
                        for layer, space in learned.spaces.items()
                    },
                    "scales": {layer: dict(scales) for layer, scales in learned.scales.items()},
                }
                for head, learned in self._learned.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state["memory"])
        self._head = state["head"]
        self._learned = {
            head: Learned(
                {layer: Space(space["chosen"], space["outside"]) for layer, space in learned["spaces"].items()},
                {layer: dict(scales) for layer, scales in learned["scales"].items()},
            )
            for head, learned in state["learned"].items()
        }
        self._open({layer: list(regions) for layer, regions in state["regions"].items()}, state["regions"])

    def bytes(self) -> dict[str, int]:
        learned = self._learned.values()
        scales = [scale for task in learned for by_head in task.scales.values() for scale in by_head.values()]
        current = [region for regions in self._regions.values() for region in regions]
        return super().bytes() | {
            "spaces": sum(space.nbytes for task in learned for space in task.spaces.values()),
            "scales": sum(scale.nbytes for scale in [*scales, *(region.scale for region in current)]),
            # Of the task that is being learned: bases beside the memory's, and what the weights do along them.
            "regions": sum(
                region.space.nbytes + (0 if region.inside is None else region.inside.nbytes) for region in current
            ),
        }

    def _choose_tasks(self, head: int, batches: Iterable[Batch]) -> dict[str, list[str]]:
        """Heads of the old tasks that each layer trusts, the most trusted first."""
        wanted, lots = self.settings.trust_samples, []
        for lot in batches:
            lots.append(lot)
            if sum(len(labels) for _, labels in lots) >= wanted:
                break
        inputs, labels = (torch.cat(parts)[:wanted] for parts in zip(*lots, strict=True))
        names = {parameter.name for layer in self._layers.values() for parameter in layer.parameters}
        parameters = {name: parameter for name, parameter in self.network.named_parameters() if name in names}
        was_training = self.network.training
        self.network.eval()
        try:
            loss = F.cross_entropy(self.network(inputs, head), labels)
            found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        finally:
            self.network.train(was_training)
        gradients = dict(zip(parameters, found, strict=True))
        trusted: dict[str, list[str]] = {}
        for name, layer in self._layers.items():
            gradient = gradients[layer.weight.name]
            if gradient is None:
                continue
            matrix = layer.block.view_matrix(gradient)
            offset = None if layer.bias is None else gradients[layer.bias.name]
            vector = None if offset is None else layer.block.view_bias(offset)
            whole = torch.cat([matrix.flatten(), *([] if vector is None else [vector.flatten()])]).norm()
            norms = {
                old: float(compute_coefficients(self._space(old, name), matrix, vector).norm())
                for old, learned in self._learned.items()
                if name in learned.spaces
            }
            best = sorted(norms, key=lambda old: -norms[old])[: self.settings.trust_tasks]
            chosen = [old for old in best if norms[old] > self.settings.trust_threshold * float(whole)]
            if chosen:
                trusted[name] = chosen
        if self.settings.scaling == "by-first-layer" and self._first_layer not in trusted:
            return {}
        return trusted

    def _space(self, head: str, layer: str) -> Tensor:
        bases = self.memory.subspaces[layer]
        assert isinstance(bases, Subspace)
        return self._learned[head].spaces[layer].basis(bases)

    def _open(self, trusted: Mapping[str, Sequence[str]], saved: Mapping[str, Any] | None = None) -> None:
        """Begin to learn scales for these tasks of each layer. saved: what the weights do there, from a checkpoint."""
        self._regions = {}
        self._scales.clear()
        for layer, heads in trusted.items():
            self._regions[layer] = []
            for head in heads:
                space = self._space(head, layer)
                groups, _, k = space.shape
                scale = nn.Parameter(space.new_zeros(groups, k, k))
                self._scales[f"{layer.replace('.', '/')}:{head}"] = scale
                inside = None
                if saved is not None:
                    inside = saved[layer][head].get("inside")
                elif self.settings.appended == "all":
                    with torch.no_grad():
                        inside = compute_coefficients(space, *self._matrices(self._layers[layer]))
                self._regions[layer].append(Region(head, space, scale, inside))

    def _regions_of(self, head: str) -> dict[str, list[Region]]:
        """Those of a task that has been learned."""
        learned = self._learned.get(head, Learned())
        return {
            layer: [Region(old, self._space(old, layer), scale) for old, scale in scales.items()]
            for layer, scales in learned.scales.items()
        }

    def _run(self, inputs: Tensor, head: int, regions: Mapping[str, Sequence[Region]]) -> Tensor:
        """The network with scaled weights."""
        replaced: dict[str, Tensor] = {}
        with ExitStack() as stack:
            for name, found in regions.items():
                layer = self._layers[name]
                if layer.layer_type.is_linear and len(layer.sources) == 1:
                    module = self.network.get_submodule(layer.sources[0].module)
                    hook = module.register_forward_hook(self._added(layer, found))
                    stack.callback(hook.remove)
                else:
                    self._replace(layer, found, replaced)
            logits: Tensor = torch.func.functional_call(self.network, replaced, (inputs, head))
            return logits

    def _added(self, layer: ProtectedLayer, regions: Sequence[Region]) -> Callable[..., Tensor]:
        """A hook that adds to a linear layer's output what the scales add to its weight."""
        # Once, though the layer may be called more often.
        insides = [self._inside(layer, region)[0] for region in regions]

        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            (x,) = args
            width = x.shape[-1]
            for region, inside in zip(regions, insides, strict=True):
                space = region.space[0]
                along_space = x @ space[:width]
                if layer.bias is not None:
                    along_space = along_space + space[width]
                output = output + (along_space @ region.scale[0].mT) @ inside.mT
            return output

        return hook

    def _replace(self, layer: ProtectedLayer, regions: Sequence[Region], replaced: dict[str, Tensor]) -> None:
        """Put a layer's W_eff among the parameters that replace others."""
        change, bias_change = self._change(layer, regions)
        weight = self.network.get_parameter(layer.weight.name)
        replaced[layer.weight.name] = replaced.get(layer.weight.name, weight) + layer.block.embed_matrix(change, weight)
        if layer.bias is not None and bias_change is not None:
            bias = self.network.get_parameter(layer.bias.name)
            replaced[layer.bias.name] = replaced.get(layer.bias.name, bias) + layer.block.embed_bias(bias_change, bias)

    def _change(self, layer: ProtectedLayer, regions: Sequence[Region]) -> tuple[Tensor, Tensor | None]:
        """W_eff - W of a layer, by factors: nothing larger than W is ever formed."""
        weight, bias = self._matrices(layer)
        change = weight.new_zeros(*weight.shape[:2], weight.shape[2] + (bias is not None))
        for region in regions:
            change = torch.baddbmm(change, self._inside(layer, region) @ region.scale, region.space.mT)
        return change[..., : weight.shape[2]], None if bias is None else change[..., -1]

    def _inside(self, layer: ProtectedLayer, region: Region) -> Tensor:
        """W S of a layer. [groups, out, k]"""
        return compute_coefficients(region.space, *self._matrices(layer)) if region.inside is None else region.inside

    def _matrices(self, layer: ProtectedLayer) -> tuple[Tensor, Tensor | None]:
        """A layer's weight as matrices, and the bias that is protected with it."""
        bias = None if layer.bias is None else layer.block.view_bias(self.network.get_parameter(layer.bias.name))
        return layer.block.view_matrix(self.network.get_parameter(layer.weight.name)), bias
