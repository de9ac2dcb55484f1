"""TRGP (Lin, Yang, Fan & Zhang, ICLR 2022): GPM whose weights are scaled inside the spaces of trusted old tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgp.methods.calls import compute_gradients
from sgp.methods.gpm import GPM, AnnotatedMemory, check_no_embeddings, embed_matrices, get_matrices
from sgp.methods.method import Batch, Stateful, concatenate_batches, sum_bytes, use_mode
from sgp.methods.settings import TRGPFacts, TRGPSettings
from sgp.patterns import check_patterns, find_pattern
from sgp.projection import Subspace
from sgp.projection.gram import InputGram
from sgp.projection.layer import ProtectedLayer
from sgp.projection.scan import ScanRules, scan_model
from sgp.projection.subspace import Bases, Choice, compute_coefficients, find_minimal_rank


class Space(TypedDict):
    """The space of one task in one layer: some of the layer's bases, to which later tasks only add.

    Attributes:
        chosen: Which of the bases at the end of the task. [groups, k] bool
        outside: Directions that are not in the memory. [groups, d, 0 or 1]
    """

    chosen: Tensor
    outside: Tensor


def compute_basis(space: Space, memory: Subspace) -> Tensor:
    """Return S of a space, [groups, d, k]; where groups differ in rank, the rest is zero columns."""
    counts = space["chosen"].sum(-1)
    order = space["chosen"].int().argsort(dim=-1, descending=True, stable=True)[:, : int(counts.max())]
    return torch.cat([_take_columns(memory.basis, order, counts), space["outside"]], dim=-1)


def _take_columns(basis: Tensor, order: Tensor, counts: Tensor) -> Tensor:
    """Return the columns of a basis in some order, with zeros beyond each group's count."""
    kept = torch.arange(order.shape[1]) < counts.unsqueeze(-1)
    return basis.gather(2, order.unsqueeze(1).expand(-1, basis.shape[1], -1)) * kept.unsqueeze(1)


class UnionMemory(AnnotatedMemory):
    """Gradient memory in which a task's space is the smallest set of old and new bases that reaches the threshold.

    Of the old bases and the directions of the residual, those with the most energy are taken first. The new ones among
    them join the memory. So an old basis counts only if it is among the strongest, and a task may add more than in GPM.

    Attributes:
        without_strongest: Whether the strongest new direction of a later task is left out of the memory.
        spaces: Space of the last task in each layer.
    """

    without_strongest = False

    @property
    def spaces(self) -> dict[str, Space]:
        return self._get_notes()

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
            grown, outside = _remove_first_new(bases, grown)
        column = torch.arange(grown.basis.shape[2])
        is_old = column < bases.rank.unsqueeze(-1)
        new = ~is_old & (column < grown.rank.unsqueeze(-1))
        old = F.pad(taken, (0, len(column) - taken.shape[1])) & is_old
        self._add_note(grown, Space(chosen=old | new, outside=outside))
        return grown


def _remove_first_new(start: Subspace, grown: Subspace) -> tuple[Subspace, Tensor]:
    """Remove the strongest new basis of each group that had bases before.

    Returns:
        The grown subspace without these bases, and the bases.
    """
    column = torch.arange(grown.basis.shape[2])
    has_it = (grown.rank > start.rank) & (start.rank > 0)
    is_it = (column == start.rank.unsqueeze(-1)) & has_it.unsqueeze(-1)
    outside = (grown.basis * is_it.unsqueeze(1)).sum(-1, keepdim=True)
    rank = grown.rank - has_it.long()
    order = is_it.int().argsort(dim=-1, stable=True)[:, : int(rank.max())]
    kept = torch.arange(order.shape[1]) < rank.unsqueeze(-1)
    smaller = Subspace(_take_columns(grown.basis, order, rank), grown.importance.gather(1, order) * kept, rank)
    return smaller, outside[..., : int(has_it.any())]


@dataclass(frozen=True)
class Region:
    """An old task that a layer trusts.

    Attributes:
        head: Head of the old task.
        space: S of the old task. [groups, d, k]
        scale: Q - I. [groups, k, k]
        inside: W S, if no step changes it. [groups, out, k]
    """

    head: str
    space: Tensor
    scale: Tensor
    inside: Tensor | None = None


class Learned(TypedDict):
    """Spaces and scales of a learned task.

    Attributes:
        spaces: Space of the task in each layer.
        scales: Q - I by layer and head of the trusted task.
    """

    spaces: dict[str, Space]
    scales: dict[str, dict[str, Tensor]]


class TRGP(TRGPFacts, GPM):
    """Gradient memory, and weights that each task scales inside the spaces of old tasks that it trusts.

    Before a task, let G be the gradient of its loss with respect to a layer's weight. The layer trusts the old tasks s
    with the largest |G S_s|, up to two of them, of which |G S_s| > epsilon |G|. The task then uses

        W_eff = W + sum_s W S_s (Q_s - I) S_s^T,

    with Q_s learned beside W, from I on, and stored with the task. W is trained as in GPM.

    No step of GPM changes W S, since the memory contains S; and the gradient of W through the second term lies in the
    span of S, which the memory removes. So W S is computed once a task, as a constant. A linear layer adds
    ((x S)(Q - I)^T)(W S)^T to its output, which is cheap for small batches and leaves the gradient of W to the layer's
    input alone; other layers run with W_eff. Where the memory lacks a direction of S, as with
    `appended="all-but-strongest"`, W S is computed anew in each step and takes part in the gradient.
    """

    Memory = UnionMemory
    settings: TRGPSettings
    memory: UnionMemory
    state_names = ("_head", "_learned")

    def __init__(self, network: nn.Module, settings: TRGPSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.memory.without_strongest = settings.appended == "all-but-strongest"
        # Not those of the memory, which it replaces in an update, and which hold its bases.
        layers = scan_model(network, ScanRules(tuple(exclude), settings.bias, settings.norms)).layers
        check_no_embeddings(self.name, layers)
        unscaled = [settings.unscaled] if settings.unscaled else []
        check_patterns(network, unscaled, "unscaled", layers)
        # A weight that has inputs on both sides has no single space.
        self._layers = {
            name: layer for name, layer in layers.items() if not layer.is_two_sided and not find_pattern(name, unscaled)
        }
        self._first_layer = next(iter(layers))
        self._scales = nn.ParameterDict()
        self._trained = nn.ModuleDict({"network": network, "scales": self._scales})
        self._head: str | None = None
        self._regions: dict[str, list[Region]] = {}
        # By head, in the order in which the tasks were learned.
        self._learned: dict[str, Learned] = {}

    @property
    def rest(self) -> Literal["freeze", "free"]:
        return self.settings.norms

    @property
    def trained_module(self) -> nn.Module:
        return self._trained

    def begin_task(self, head: int, batches: Iterable[Batch]) -> None:
        self._head = str(head)
        trusted = self._choose_tasks(head, batches) if self._learned and self.settings.trust_tasks else {}
        self._add_scales(trusted)

    def compute_logits(self, inputs: Tensor, head: int) -> Tensor:
        """Run the network with scaled weights."""
        replaced: dict[str, Tensor] = {}
        with ExitStack() as stack:
            for name, regions in self._get_regions(str(head)).items():
                layer = self._layers[name]
                if layer.layer_type.is_linear and len(layer.sources) == 1:
                    # W S once, though the layer may be called several times.
                    inside = [self._compute_inside(layer, region) for region in regions]
                    hook = partial(_add_scaled_output, regions, inside, layer.bias is not None)
                    module = self.network.get_submodule(layer.sources[0].module)
                    stack.enter_context(module.register_forward_hook(hook))
                else:
                    parameters = self._get_parameters(layer)
                    change = self._compute_change(layer, regions)
                    for weight, embedded in embed_matrices(layer, *change, like=parameters).items():
                        replaced[weight] = replaced.get(weight, parameters[weight]) + embedded
            return self.run_with(replaced, inputs, head)

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        assert self._head is not None
        regions = self._regions
        if self.settings.representation == "plain":
            self._regions = {}  # log_likelihood runs `compute_logits`, which scales the weights of these layers
        try:
            super().consolidate(batches, log_likelihood)
        finally:
            self._regions = regions
        scales = {
            layer: {region.head: region.scale.detach().clone() for region in own} for layer, own in regions.items()
        }
        self._learned[self._head] = Learned(spaces=self.memory.spaces, scales=scales)
        self.memory.clear_notes()
        self._head = None
        self._add_scales({})

    def state_dict(self) -> dict[str, Any]:
        return {
            "memory": super().state_dict(),
            "regions": {
                layer: {region.head: {} if region.inside is None else {"inside": region.inside} for region in regions}
                for layer, regions in self._regions.items()
            },
            **Stateful.state_dict(self),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state["memory"])
        Stateful.load_state_dict(self, state)
        self._add_scales({layer: list(regions) for layer, regions in state["regions"].items()}, state["regions"])

    def count_bytes(self) -> dict[str, int]:
        learned = self._learned.values()
        current = [region for regions in self._regions.values() for region in regions]
        # Of the current task: bases beside the memory's, and W S.
        regions = [part for region in current for part in (region.space, region.inside) if part is not None]
        return super().count_bytes() | {
            "spaces": sum_bytes(task["spaces"] for task in learned),
            "scales": sum_bytes([*(task["scales"] for task in learned), [region.scale for region in current]]),
            "regions": sum_bytes(regions),
        }

    def _choose_tasks(self, head: int, batches: Iterable[Batch]) -> dict[str, list[str]]:
        """Return the heads of the old tasks that each layer trusts, the most trusted first."""
        inputs, labels = concatenate_batches(batches, self.settings.trust_samples)
        names = {parameter.name for layer in self._layers.values() for parameter in layer.parameters}
        parameters = {name: parameter for name, parameter in self.network.named_parameters() if name in names}
        with use_mode(self.network, training=False):
            gradients, _ = compute_gradients(F.cross_entropy(self.network(inputs, head), labels), parameters)
        trusted: dict[str, list[str]] = {}
        for name, layer in self._layers.items():
            if layer.weight.name not in gradients:
                continue
            matrix, bias = get_matrices(layer, gradients)
            whole = torch.cat([matrix.flatten(), *([] if bias is None else [bias.flatten()])]).norm()
            norms = {
                old: float(compute_coefficients(self._get_space(old, name), matrix, bias).norm())
                for old, learned in self._learned.items()
                if name in learned["spaces"]
            }
            best = sorted(norms, key=lambda old: -norms[old])[: self.settings.trust_tasks]
            chosen = [old for old in best if norms[old] > self.settings.trust_threshold * float(whole)]
            if chosen:
                trusted[name] = chosen
        if self.settings.scaling == "by-first-layer" and self._first_layer not in trusted:
            return {}
        return trusted

    def _get_space(self, head: str, layer: str) -> Tensor:
        bases = self.memory.subspaces[layer]
        assert isinstance(bases, Subspace)
        return compute_basis(self._learned[head]["spaces"][layer], bases)

    def _add_scales(self, trusted: Mapping[str, Sequence[str]], saved: Mapping[str, Any] | None = None) -> None:
        """Replace the scales that are trained.

        Args:
            trusted: Heads of the old tasks that each layer trusts.
            saved: The "regions" of a `state_dict`, with W S.
        """
        self._regions = {}
        self._scales.clear()
        for layer, heads in trusted.items():
            self._regions[layer] = []
            for head in heads:
                space = self._get_space(head, layer)
                groups, _, k = space.shape
                scale = nn.Parameter(space.new_zeros(groups, k, k))
                self._scales[f"{layer.replace('.', '/')}:{head}"] = scale
                inside = None
                if saved is not None:
                    inside = saved[layer][head].get("inside")
                elif self.settings.appended == "all":
                    with torch.no_grad():
                        inside = self._compute_inside(self._layers[layer], Region(head, space, scale))
                self._regions[layer].append(Region(head, space, scale, inside))

    def _get_regions(self, head: str) -> dict[str, list[Region]]:
        """Return the old tasks that each layer trusts in a task."""
        if head == self._head:
            return self._regions
        learned = self._learned[head]["scales"] if head in self._learned else {}
        return {
            layer: [Region(old, self._get_space(old, layer), scale) for old, scale in scales.items()]
            for layer, scales in learned.items()
        }

    def _compute_change(self, layer: ProtectedLayer, regions: Sequence[Region]) -> tuple[Tensor, Tensor | None]:
        """Compute W_eff - W of a layer from its factors: nothing larger than W is ever formed."""
        weight, bias = get_matrices(layer, self._get_parameters(layer))
        change = weight.new_zeros(*weight.shape[:2], weight.shape[2] + (bias is not None))
        for region in regions:
            change = torch.baddbmm(change, self._compute_inside(layer, region) @ region.scale, region.space.mT)
        return change[..., : weight.shape[2]], None if bias is None else change[..., -1]

    def _compute_inside(self, layer: ProtectedLayer, region: Region) -> Tensor:
        """Compute W S of a layer, [groups, out, k]."""
        if region.inside is not None:
            return region.inside
        return compute_coefficients(region.space, *get_matrices(layer, self._get_parameters(layer)))

    def _get_parameters(self, layer: ProtectedLayer) -> dict[str, Tensor]:
        return {parameter.name: self.network.get_parameter(parameter.name) for parameter in layer.parameters}


def _add_scaled_output(
    regions: Sequence[Region], insides: Sequence[Tensor], has_bias: bool, module: nn.Module, args: Any, output: Tensor
) -> Tensor:
    """Forward hook that adds to a linear layer's output what the scales add to its weight."""
    (x,) = args
    width = x.shape[-1]
    for region, inside in zip(regions, insides, strict=True):
        space = region.space[0]
        along_space = x @ space[:width]
        if has_bias:
            along_space = along_space + space[width]
        output = output + (along_space @ region.scale[0].mT) @ inside[0].mT
    return output
