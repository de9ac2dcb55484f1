"""Frozen network: only heads are trained, so nothing is forgotten. The control for pretrained networks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, Optimizer

from sgp.methods.method import Batch, Method, Moment, NormStatistics
from sgp.methods.settings import FrozenFacts, FrozenSettings
from sgp.networks.heads import Heads

# Steps of L-BFGS, far more than a head has been seen to need.
MOST_STEPS = 1000


class Frozen(FrozenFacts, Method[FrozenSettings]):
    """The best linear heads on features that do not change.

    A head is fitted at the start of its task, to the features of all examples at once:
    argmin over W, b of the mean cross-entropy + mu/2 |W|^2, a convex problem, by L-BFGS to convergence. Epochs only
    measure it.
    """

    norm_statistics: NormStatistics = "own"

    def __init__(self, network: nn.Module, settings: FrozenSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        heads = dict(network.named_children()).get("heads")
        if not isinstance(heads, Heads):
            raise ValueError("frozen trains heads only, and the network has none: add sgp.networks.heads.Heads to it")
        self._heads = heads

    @property
    def trained_module(self) -> nn.Module:
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(name.startswith("heads."))
        return self.network

    def begin_task(self, head: int, batches: Iterable[Batch]) -> None:
        features, labels = self._compute_features(head, batches)
        layer = self._heads[0 if len(self._heads) == 1 else head]
        assert isinstance(layer, nn.Linear)
        optimizer = LBFGS(
            layer.requires_grad_(True).parameters(),
            max_iter=MOST_STEPS,
            tolerance_grad=1e-6,
            tolerance_change=1e-10,
            line_search_fn="strong_wolfe",
        )

        def compute_loss() -> Tensor:
            optimizer.zero_grad()
            penalty = self.settings.head_decay / 2 * layer.weight.square().sum()
            value = F.cross_entropy(layer(features), labels) + penalty
            value.backward()  # type: ignore[no-untyped-call]
            return value

        optimizer.step(compute_loss)  # type: ignore[no-untyped-call]
        optimizer.zero_grad()

    @torch.no_grad()
    def _compute_features(self, head: int, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
        """Return the heads' inputs for all examples, and the labels."""
        features: list[Tensor] = []
        all_labels = []
        self.network.eval()
        with self._heads.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0])):
            for inputs, labels in batches:
                self.network(inputs, head)
                all_labels.append(labels)
        return torch.cat(features), torch.cat(all_labels)

    @torch.no_grad()
    def step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> float:
        # Features as they are at test time: dropout and batch statistics are for training the layers below.
        self.network.eval()
        return self.compute_loss(batch, head, moment).item()
