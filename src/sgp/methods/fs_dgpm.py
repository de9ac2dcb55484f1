"""FS-DGPM (Deng, Chen, Hao, Wang & Heng, NeurIPS 2021): flat minima, replay, and bases with learned weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from sgp.methods.buffer import Reservoir
from sgp.methods.calls import compute_gradients, record_calls
from sgp.methods.gpm import GPM, check_no_embeddings, embed_matrices, get_matrices
from sgp.methods.method import Batch, Moment, Stateful, sum_bytes
from sgp.methods.replay import append_drawn, make_rows
from sgp.methods.settings import FSDGPMFacts, FSDGPMSettings
from sgp.projection import GradientMemory
from sgp.projection.gram import InputGram
from sgp.projection.layer import ProtectedLayer
from sgp.projection.scan import ScanRules, scan_model
from sgp.projection.subspace import Bases, Choice, Subspace

# Steepness of the sigmoid that keeps soft weights between 0 and 1.
STEEPNESS = 10.0


class FreshMemory(GradientMemory):
    """Gradient memory that computes its bases anew in each update."""

    def grow_bases(self, bases: Bases, gram: InputGram, threshold: float, choose: Choice | None = None) -> Bases:
        return super().grow_bases(Subspace.empty(bases.groups, bases.dimension), gram, threshold, choose)


def _is_projected_by_rows(layer: ProtectedLayer) -> bool:
    return layer.layer_type.is_linear and len(layer.sources) == 1


def _sum_parts(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Sum the parts that several layers, or calls, contribute to the same parameters."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            total[name] = total[name] + tensor if name in total else tensor
    return total


class FSDGPM(FSDGPMFacts, GPM):
    """Steps that flatten the loss along old directions, on new and old examples, and move little along them.

    Let M be a layer's bases and lambda their soft weights, 1 when a task begins. A training step cuts its batch into
    parts. Starting from the weights W, part i takes a step uphill inside the old directions, W_i := W_{i-1} + eta_1 g_i
    M diag(lambda) M^T with g_i the gradient at W_{i-1}. The loss is the mean over i of the cross-entropy at W_i of the
    batch together with replayed examples. Its gradient first trains lambda, with learning rate eta_2; then W gets
    g - g M diag(lambda) M^T. In the first task there are no bases, and the steps uphill are g_i itself; parameters
    without bases always step by g_i. After each task the bases are computed anew, from stored examples of all tasks.
    """

    Memory = FreshMemory
    settings: FSDGPMSettings
    state_names = ("_soft", "_soft_momentum")

    def __init__(self, network: nn.Module, settings: FSDGPMSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.buffer = Reservoir(settings.memory_size)
        self._scan = scan_model(network, ScanRules(tuple(exclude), settings.bias, settings.norms))
        check_no_embeddings(self.name, self._scan.layers)
        # By layer: lambda, or u of which lambda is the sigmoid; and its momentum.
        self._soft: dict[str, Tensor] = {}
        self._soft_momentum: dict[str, Tensor] = {}

    @property
    def rest(self) -> Literal["freeze", "free"]:
        return self.settings.norms

    def begin_task(self, head: int, batches: Iterable[Batch]) -> None:
        self._soft_momentum = {}
        self._soft = {name: torch.ones_like(space.importance) for name, space in self.memory.subspaces.items()}
        self.memory.set_importances(self.compute_soft_weights())

    def build_optimizer(self, kind: Callable[..., Optimizer], lr: float) -> Optimizer:
        if self.settings.momentum == 0:
            return super().build_optimizer(kind, lr)
        if kind is not SGD:
            raise ValueError(f"momentum goes with optimizer=sgd; set momentum=0, got {self.settings.momentum}")
        return SGD(self.network.parameters(), lr=lr, momentum=self.settings.momentum)

    def attach(self, optimizer: Optimizer) -> None:
        # Steps uphill need whole gradients, so inputs may not be replaced.
        self.memory.attach(optimizer, mode="gradient", every=self.settings.project_every)

    def step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> float:
        # All learning rates fall together.
        share = optimizer.param_groups[0]["lr"] / optimizer.defaults["lr"]
        learns = self.settings.soft_weights != "orphaned"
        soft = {name: value.clone().requires_grad_(learns) for name, value in self._soft.items()}
        optimizer.zero_grad()
        loss = self._differentiate(batch, head, self._weigh_bases(soft), self.settings.sharpness_lr * share)
        if self.settings.clip < math.inf:
            nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.clip)
        self._update_soft({name: value.grad for name, value in soft.items()}, self.settings.soft_lr * share)
        optimizer.step()
        if self.settings.is_filled(moment.epoch):
            self.buffer.add(make_rows(batch, head))
        return loss

    def get_passes(self, batch: Batch, head: int) -> list[tuple[Tensor, int | Tensor]]:
        # The passes of the loss; the steps uphill use the same batch.
        inputs, _, heads = self._append_replay(batch, head)
        return [(inputs, heads)]

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        drawn = self.buffer.draw(self.consolidation_batch)
        heads = drawn["heads"]

        def forward(batch: Batch) -> Tensor:
            # The bases do not depend on labels.
            logits: Tensor = self.network(batch[0], heads)
            return logits

        super().consolidate([(drawn["inputs"], drawn["labels"])], forward)
        # The next task starts with soft weights of its own.
        self._soft, self._soft_momentum = {}, {}

    def _split_texts(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        return batches  # `forward` knows the heads of the batch as it was drawn

    def compute_soft_weights(self) -> dict[str, Tensor]:
        """Return lambda of each basis by layer, [groups, k]."""
        return {name: self._compute_lambda(value) for name, value in self._soft.items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "memory": super().state_dict(),
            "buffer": self.buffer.state_dict(),
            **Stateful.state_dict(self),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state["memory"])
        self.buffer.load_state_dict(state["buffer"])
        Stateful.load_state_dict(self, state)

    def count_bytes(self) -> dict[str, int]:
        importances = [space.importance for space in self.memory.subspaces.values()]
        return super().count_bytes() | {
            "data": sum(self.buffer.count_bytes().values()),
            "importances": sum_bytes([self._soft, self._soft_momentum, importances]),
        }

    def _differentiate(self, batch: Batch, head: int, spaces: Mapping[str, Subspace], lr: float) -> float:
        """Return the mean loss of batch and replayed examples after each step uphill, and set its gradients."""
        inputs, labels = batch
        all_inputs, all_labels, heads = self._append_replay(batch, head)
        weights: dict[str, Tensor] = dict(self.network.named_parameters())
        # BatchNorm cannot normalize a single example.
        parts = max(1, min(self.settings.inner_steps, len(labels) // 2))
        total, reached, gradients = 0.0, [], []
        for part in zip(inputs.tensor_split(parts), labels.tensor_split(parts), strict=True):
            uphill = self._compute_uphill(part, head, weights, spaces)
            weights = weights | {name: torch.add(weights[name], step, alpha=lr) for name, step in uphill.items()}
            # Differentiate each loss with respect to its own weights at once, so that only one forward pass is in
            # memory at a time; the way from there to the original weights is short.
            here = {name: weight.detach().requires_grad_(weight.requires_grad) for name, weight in weights.items()}
            logits = self.run_with(here, all_inputs, heads)
            loss = F.cross_entropy(logits, all_labels) / parts
            trained = {name: weight for name, weight in here.items() if weight.requires_grad}
            for name, gradient in compute_gradients(loss, trained)[0].items():
                reached.append(weights[name])
                gradients.append(gradient)
            total += loss.item()
        torch.autograd.backward(reached, gradients)
        return total

    def _append_replay(self, batch: Batch, head: int) -> tuple[Tensor, Tensor, int | Tensor]:
        """Return inputs, labels and heads of a batch and of stored examples drawn beside it."""
        return append_drawn(batch, head, self.buffer.draw(self.settings.count_draws(len(batch[1]))))

    def _compute_uphill(
        self, batch: Batch, head: int, weights: dict[str, Tensor], spaces: Mapping[str, Subspace]
    ) -> dict[str, Tensor]:
        """Compute the direction of a step uphill, for each parameter that has a gradient and may move.

        For a linear layer it is D^T (X M diag(lambda) M^T); see sgp.methods.calls.
        """
        inputs, labels = batch
        layers = {name: self._scan.layers[name] for name in spaces}
        by_rows = {name: layer for name, layer in layers.items() if _is_projected_by_rows(layer)}
        modules = {name: self.network.get_submodule(layer.sources[0].module) for name, layer in by_rows.items()}
        with record_calls(modules) as calls:
            logits = self.run_with(weights, inputs, head)
        frozen = self._scan.frozen if self.memory.tasks else {}
        left_out = {*frozen, *(parameter.name for layer in by_rows.values() for parameter in layer.parameters)}
        wanted = {name: weight for name, weight in weights.items() if weight.requires_grad and name not in left_out}
        loss = F.cross_entropy(logits, labels)
        directions, deltas = compute_gradients(loss, wanted, calls, create_graph=self.settings.second_order)
        inside = [
            *(self._project(layers[name], spaces[name], directions) for name in spaces if name not in by_rows),
            *(self._project_rows(by_rows[call.layer], spaces[call.layer], call.input, D) for call, D in deltas),
        ]
        directions |= _sum_parts(inside)
        clip = self.settings.clip
        return directions if clip == math.inf else {n: step.clamp(-clip, clip) for n, step in directions.items()}

    def _project(self, layer: ProtectedLayer, space: Subspace, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the part of a layer's gradient that lies along its bases."""
        if layer.weight.name not in gradients:
            return {}
        return embed_matrices(layer, *space.compute_blocked_part(*get_matrices(layer, gradients)), like=gradients)

    def _project_rows(self, layer: ProtectedLayer, space: Subspace, rows: Tensor, D: Tensor) -> dict[str, Tensor]:
        """Compute the same from a linear layer's inputs and the gradient of its outputs."""
        rows, D = rows.reshape(-1, rows.shape[-1]), D.reshape(-1, D.shape[-1])
        if not self.settings.second_order:
            rows = rows.detach()
        ones = None if layer.bias is None else rows.new_ones(1, len(rows))
        part, bias_part = space.compute_blocked_part(rows.unsqueeze(0), ones)
        parts = {layer.weight.name: D.mT @ part[0]}
        if layer.bias is not None and bias_part is not None:
            parts[layer.bias.name] = D.mT @ bias_part[0]
        return parts

    def _weigh_bases(self, soft: Mapping[str, Tensor]) -> dict[str, Subspace]:
        """Return the layers' bases with soft weights through which gradients flow."""
        weighted = {}
        for name, value in soft.items():
            space = self.memory.subspaces[name]
            if isinstance(space, Subspace) and not space.is_empty:
                weighted[name] = space.with_importance(self._compute_lambda(value))
        return weighted

    def _compute_lambda(self, soft: Tensor) -> Tensor:
        return torch.sigmoid(STEEPNESS * soft) if self.settings.soft_weights == "once" else soft

    def _update_soft(self, gradients: Mapping[str, Tensor | None], lr: float) -> None:
        """Take one step of the soft weights, and let the memory project with them."""
        rule, momentum = self.settings.soft_weights, self.settings.momentum
        for name, gradient in gradients.items():
            value = self._soft[name]
            if rule != "orphaned" and gradient is not None:
                if momentum:
                    before = self._soft_momentum.get(name)
                    gradient = gradient if before is None else before * momentum + gradient
                    self._soft_momentum[name] = gradient
                value = value - lr * gradient
            self._soft[name] = value if rule == "once" else torch.sigmoid(STEEPNESS * value)
        self.memory.set_importances(self.compute_soft_weights())
