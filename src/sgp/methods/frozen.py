"""The frozen network: only heads are trained, so nothing is forgotten. The control for pretrained networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sgp.methods.method import Batch, NoSettings
from sgp.methods.supervised import Moment, Supervised
from sgp.projection.layout import matches


class Frozen(Supervised[NoSettings]):
    """Linear heads on features that do not change."""

    name = "frozen"
    description = "heads on the network as it is: the control for pretrained networks"
    Settings = NoSettings
    splits_batches = True

    def __init__(self, network: nn.Module, settings: NoSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        # A head that all tasks share is not among what belongs to single ones.
        heads = self.exclude or ("heads.*",)
        self._body = [name for name, _ in network.named_parameters() if not matches(name, heads)]
        if len(self._body) == len(list(network.parameters())):
            raise ValueError(f"frozen trains heads alone, and the network has none called {', '.join(heads)}")

    @property
    def trained(self) -> nn.Module:
        for name in self._body:
            self.network.get_parameter(name).requires_grad_(False)
        return self.network

    @property
    def keeps_statistics(self) -> bool:
        return True

    def attach(self, optimizer: Optimizer) -> None:
        """Nothing acts on the optimizer: what has no gradient does not move."""

    def loss(self, batch: Batch, head: int, moment: Moment) -> Tensor:
        # Features as they are at test: dropout and batch statistics are for training what is below.
        self.network.eval()
        return super().loss(batch, head, moment)

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        """Nothing is kept of a task but its head."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to load."""
