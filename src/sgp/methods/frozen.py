"""The frozen network: only heads are trained, so nothing is forgotten. The control for pretrained networks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, Optimizer

from sgp.methods.method import Batch, Method, Moment, NormStatistics
from sgp.methods.settings.frozen import FrozenFacts, FrozenSettings
from sgp.networks.heads import Heads

# Steps of L-BFGS, far more than a head has been seen to need.
MOST_STEPS = 1000


class Frozen(FrozenFacts, Method[FrozenSettings]):
    """The best linear heads on features that do not change.

    A head is found at the start of its task, from the features of all examples at once:
    argmin over W, b of the mean cross-entropy + mu/2 |W|^2, a convex problem, by L-BFGS to convergence. Epochs only
    measure it.
    """

    def __init__(self, network: nn.Module, settings: FrozenSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        heads = dict(network.named_children()).get("heads")
        if not isinstance(heads, Heads):
            raise ValueError("frozen trains heads alone, and the network has none: give it sgp.networks.heads.Heads")
        self._heads = heads

    @property
    def trained(self) -> nn.Module:
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(name.startswith("heads."))
        return self.network

    @property
    def statistics(self) -> NormStatistics:
        return "own"

    def begin(self, head: int, batches: Iterable[Batch]) -> None:
        features, labels = self._features(head, batches)
        layer = self._heads[0 if len(self._heads) == 1 else head]
        assert isinstance(layer, nn.Linear)
        optimizer = LBFGS(
            layer.requires_grad_(True).parameters(),
            max_iter=MOST_STEPS,
            tolerance_grad=1e-6,
            tolerance_change=1e-10,
            line_search_fn="strong_wolfe",
        )

        def loss() -> Tensor:
            optimizer.zero_grad()
            penalty = self.settings.head_decay / 2 * layer.weight.square().sum()
            value = F.cross_entropy(layer(features), labels) + penalty
            value.backward()  # type: ignore[no-untyped-call]
            return value

        optimizer.step(loss)  # type: ignore[no-untyped-call]
        optimizer.zero_grad()

    @torch.no_grad()
    def _features(self, head: int, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
        """What the heads see of all examples, and their labels."""
        seen: list[Tensor] = []
        labels = []
        hook = self._heads.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        self.network.eval()
        try:
            for inputs, own in batches:
                self.network(inputs, head)
                labels.append(own)
        finally:
            hook.remove()
        return torch.cat(seen), torch.cat(labels)

    @torch.no_grad()
    def step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> float:
        # Features as they are at test: dropout and batch statistics are for training what is below.
        self.network.eval()
        return self.loss(batch, head, moment).item()
