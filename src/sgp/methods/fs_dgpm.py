"""FS-DGPM (Deng, Chen, Hao, Wang & Heng, NeurIPS 2021): flat minima, replay, and bases whose weights are learned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from sgp.methods.buffer import Reservoir
from sgp.methods.calls import recorded
from sgp.methods.gpm import GPM, refuse_embeddings
from sgp.methods.method import Batch, Moment
from sgp.methods.replay import example_rows, joined
from sgp.methods.settings.fs_dgpm import FSDGPMFacts, FSDGPMSettings
from sgp.methods.settings.gpm import GPMSettings
from sgp.projection import GradientMemory
from sgp.projection.gram import InputGram
from sgp.projection.layer import ProtectedLayer
from sgp.projection.scan import ScanRules, scan_model
from sgp.projection.subspace import Bases, Choice, Subspace

# Of the sigmoid that keeps soft weights between 0 and 1.
STEEPNESS = 10.0


class FreshMemory(GradientMemory):
    """A gradient memory that begins anew with each update."""

    def grow_bases(self, bases: Bases, gram: InputGram, threshold: float, choose: Choice | None = None) -> Bases:
        return super().grow_bases(Subspace.empty(bases.groups, bases.dimension), gram, threshold, choose)


def _is_by_rows(layer: ProtectedLayer) -> bool:
    return layer.layer_type.is_linear and len(layer.sources) == 1


def _summed(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Where several layers, or calls, have a part in one parameter, their sum."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            total[name] = total[name] + tensor if name in total else tensor
    return total


class FSDGPM(FSDGPMFacts, GPM):
    """Steps that flatten the loss along old directions, on new and old examples, and move little along them.

    Let M be a layer's bases and lambda their soft weights, 1 when a task begins. A training step cuts its batch into
    parts; from the weights W on, part i gives a step uphill inside the old directions, W_i := W_{i-1} + eta_1 g_i M
    diag(lambda) M^T with g_i the gradient at W_{i-1}. The loss is the mean over i of the cross-entropy at W_i of the
    batch together with replayed examples. Its gradient first teaches lambda, with rate eta_2; what reaches W is then
    g - g M diag(lambda) M^T. In the first task there are no bases and the steps uphill are g_i itself; parameters
    without bases always have those. After each task the bases are found anew, from kept examples of all tasks.
    """

    Memory = FreshMemory
    settings: FSDGPMSettings

    def __init__(self, network: nn.Module, settings: FSDGPMSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.buffer = Reservoir(settings.memory_size)
        self._scan = scan_model(network, ScanRules(tuple(exclude), settings.bias, settings.norms))
        refuse_embeddings(self.name, self._scan)
        # By layer: lambda, or u of which lambda is the sigmoid; and momentum of that.
        self._soft: dict[str, Tensor] = {}
        self._soft_momentum: dict[str, Tensor] = {}

    @staticmethod
    def _rest(settings: GPMSettings) -> Literal["freeze", "free"]:
        assert isinstance(settings, FSDGPMSettings)
        return settings.norms

    def begin(self, head: int, batches: Iterable[Batch]) -> None:
        self._soft_momentum = {}
        self._soft = {name: torch.ones_like(space.importance) for name, space in self.memory.subspaces.items()}
        self._weigh()

    def optimizer(self, kind: Callable[..., Optimizer], lr: float) -> Optimizer:
        if self.settings.momentum == 0:
            return super().optimizer(kind, lr)
        if kind is not SGD:
            raise ValueError(f"momentum goes with optimizer=sgd; set momentum=0, got {self.settings.momentum}")
        return SGD(self.network.parameters(), lr=lr, momentum=self.settings.momentum)

    def attach(self, optimizer: Optimizer) -> None:
        # The gradients of steps uphill must be whole, so that inputs may not be replaced.
        self.memory.attach(optimizer, mode="gradient", every=self.settings.project_every)

    def step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> float:
        # All rates fall together.
        share = optimizer.param_groups[0]["lr"] / optimizer.defaults["lr"]
        learns = self.settings.soft_weights != "orphaned"
        soft = {name: value.clone().requires_grad_(learns) for name, value in self._soft.items()}
        optimizer.zero_grad()
        loss = self._differentiate(batch, head, self._weighted(soft), self.settings.sharpness_lr * share)
        if self.settings.clip < math.inf:
            nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.clip)
        self._learn_soft({name: value.grad for name, value in soft.items()}, self.settings.soft_lr * share)
        optimizer.step()
        if self.settings.fill == "every-epoch" or moment.epoch == 0:
            self.buffer.add(example_rows(batch, head))
        return loss

    def passes(self, batch: Batch, head: int) -> list[tuple[Tensor, int | Tensor]]:
        # Those that the loss is of; the steps uphill are of the same batch.
        inputs, _, heads = self._with_replay(batch, head)
        return [(inputs, heads)]

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        drawn = self.buffer.draw(self.consolidation_batch)
        heads = drawn["heads"]

        def forward(batch: Batch) -> Tensor:
            # The bases do not depend on labels.
            logits: Tensor = self.network(batch[0], heads)
            return logits

        super().consolidate([(drawn["inputs"], drawn["labels"])], forward)
        # Nothing of a task's steps is for the next.
        self._soft, self._soft_momentum = {}, {}

    def _in_lots(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        return batches  # `forward` knows the heads of the batch as it was drawn

    def soft_weights(self) -> dict[str, Tensor]:
        """lambda of each basis by layer, [groups, k]."""
        return {name: self._lambda(value) for name, value in self._soft.items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "memory": super().state_dict(),
            "buffer": self.buffer.state_dict(),
            "soft": dict(self._soft),
            "soft_momentum": dict(self._soft_momentum),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state["memory"])
        self.buffer.load_state_dict(state["buffer"])
        self._soft, self._soft_momentum = dict(state["soft"]), dict(state["soft_momentum"])

    def bytes(self) -> dict[str, int]:
        soft = [*self._soft.values(), *self._soft_momentum.values()]
        importances = [space.importance for space in self.memory.subspaces.values()]
        return super().bytes() | {
            "data": sum(self.buffer.bytes().values()),
            "importances": sum(each.nbytes for each in [*soft, *importances]),
        }

    def _differentiate(self, batch: Batch, head: int, spaces: Mapping[str, Subspace], rate: float) -> float:
        """The mean loss of batch and replayed examples after each step uphill, with its gradients in ``grad``."""
        inputs, labels = batch
        everything, all_labels, heads = self._with_replay(batch, head)
        weights: dict[str, Tensor] = dict(self.network.named_parameters())
        # BatchNorm cannot normalise a single example.
        parts = max(1, min(self.settings.inner_steps, len(labels) // 2))
        total, reached, gradients = 0.0, [], []
        for part in zip(inputs.tensor_split(parts), labels.tensor_split(parts), strict=True):
            uphill = self._uphill(part, head, weights, spaces)
            weights = weights | {name: torch.add(weights[name], step, alpha=rate) for name, step in uphill.items()}
            # Each loss is led back to its own weights at once, so that one pass at a time is held; from there to what
            # those were made of the way is short.
            here = {name: weight.detach().requires_grad_(weight.requires_grad) for name, weight in weights.items()}
            trained = [name for name, weight in here.items() if weight.requires_grad]
            logits = torch.func.functional_call(self.network, here, (everything, heads))
            loss = F.cross_entropy(logits, all_labels) / parts
            found = torch.autograd.grad(loss, [here[name] for name in trained], allow_unused=True)
            for name, gradient in zip(trained, found, strict=True):
                if gradient is not None:
                    reached.append(weights[name])
                    gradients.append(gradient)
            total += loss.item()
        torch.autograd.backward(reached, gradients)
        return total

    def _with_replay(self, batch: Batch, head: int) -> tuple[Tensor, Tensor, int | Tensor]:
        """Inputs, labels and heads of a batch and of examples drawn beside it."""
        return joined(batch, head, self.buffer.draw(self.settings.memory_batch or len(batch[1])))

    def _uphill(
        self, batch: Batch, head: int, weights: dict[str, Tensor], spaces: Mapping[str, Subspace]
    ) -> dict[str, Tensor]:
        """The direction of a step uphill at some weights, for each parameter that matters here and may move.

        That of a linear layer is D^T (X M diag(lambda) M^T); see sgp.methods.calls.
        """
        inputs, labels = batch
        layers = {name: self._scan.layers[name] for name in spaces}
        by_rows = {name: layer for name, layer in layers.items() if _is_by_rows(layer)}
        modules = {name: self.network.get_submodule(layer.sources[0].module) for name, layer in by_rows.items()}
        with recorded(modules) as calls:
            logits = torch.func.functional_call(self.network, weights, (inputs, head))
        frozen = self._scan.frozen if self.memory.tasks else {}
        apart = {*frozen, *(parameter.name for layer in by_rows.values() for parameter in layer.parameters)}
        asked = {name: weight for name, weight in weights.items() if weight.requires_grad and name not in apart}
        edges: list[Any] = [*asked.values(), *(call.output for call in calls)]  # torch takes both together
        found = torch.autograd.grad(
            F.cross_entropy(logits, labels),
            edges,
            create_graph=self.settings.second_order,
            allow_unused=True,
        )
        directions = {name: g for name, g in zip(asked, found, strict=False) if g is not None}
        inside = [self._projected(layers[name], spaces[name], directions) for name in spaces if name not in by_rows] + [
            self._projected_rows(by_rows[call.layer], spaces[call.layer], call.input, D)
            for call, D in zip(calls, found[len(asked) :], strict=True)
            if D is not None
        ]
        directions |= _summed(inside)
        clip = self.settings.clip
        return directions if clip == math.inf else {n: step.clamp(-clip, clip) for n, step in directions.items()}

    def _projected(self, layer: ProtectedLayer, space: Subspace, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The part of a layer's gradient that lies along its bases."""
        if layer.weight.name not in gradients:
            return {}
        block, gradient = layer.block, gradients[layer.weight.name]
        offset = None if layer.bias is None else gradients[layer.bias.name]
        part, part_of_bias = space.compute_blocked_part(
            block.view_matrix(gradient), None if offset is None else block.view_bias(offset)
        )
        parts = {layer.weight.name: block.embed_matrix(part, gradient)}
        if layer.bias is not None and offset is not None and part_of_bias is not None:
            parts[layer.bias.name] = block.embed_bias(part_of_bias, offset)
        return parts

    def _projected_rows(self, layer: ProtectedLayer, space: Subspace, rows: Tensor, D: Tensor) -> dict[str, Tensor]:
        """The same from a linear layer's inputs and the gradient of its outputs."""
        rows, D = rows.reshape(-1, rows.shape[-1]), D.reshape(-1, D.shape[-1])
        if not self.settings.second_order:
            rows = rows.detach()
        ones = None if layer.bias is None else rows.new_ones(1, len(rows))
        part, part_of_constant = space.compute_blocked_part(rows.unsqueeze(0), ones)
        parts = {layer.weight.name: D.mT @ part[0]}
        if layer.bias is not None and part_of_constant is not None:
            parts[layer.bias.name] = D.mT @ part_of_constant[0]
        return parts

    def _weighted(self, soft: Mapping[str, Tensor]) -> dict[str, Subspace]:
        """The layers' bases with weights through which gradients flow."""
        weighted = {}
        for name, value in soft.items():
            space = self.memory.subspaces[name]
            if isinstance(space, Subspace) and not space.is_empty:
                weighted[name] = space.with_importance(self._lambda(value))
        return weighted

    def _lambda(self, soft: Tensor) -> Tensor:
        return torch.sigmoid(STEEPNESS * soft) if self.settings.soft_weights == "once" else soft

    def _learn_soft(self, gradients: Mapping[str, Tensor | None], rate: float) -> None:
        """One step of the soft weights; see the setting."""
        rule, momentum = self.settings.soft_weights, self.settings.momentum
        for name, gradient in gradients.items():
            value = self._soft[name]
            if rule != "orphaned" and gradient is not None:
                if momentum:
                    before = self._soft_momentum.get(name)
                    gradient = gradient if before is None else before * momentum + gradient
                    self._soft_momentum[name] = gradient
                value = value - rate * gradient
            self._soft[name] = value if rule == "once" else torch.sigmoid(STEEPNESS * value)
        self._weigh()

    def _weigh(self) -> None:
        """Let the memory project with the soft weights as they are."""
        self.memory.set_importances(self.soft_weights())
