"""OSF, orthogonal subspace fine-tuning (Nayak et al., 2025) of PEFT: the strongest directions of each weight stay.

Which directions matter is read off the weights themselves: each task's weight is decomposed anew, its largest singular
values and their vectors are kept as they are, and the rest is trained orthogonally to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sgp.methods.adapters import Adapters
from sgp.methods.method import Batch
from sgp.methods.settings.osf import OSFFacts, OSFSettings


class OSF(OSFFacts, Adapters[OSFSettings]):
    """Trains what is left beside the strongest singular directions of each linear layer."""

    layers = (nn.Linear,)

    def _fits(self, layer: nn.Module) -> bool:
        # Of a single direction none is left beside the strongest.
        assert isinstance(layer, nn.Linear)
        return min(layer.weight.shape) * self.settings.preserved >= 1

    def _config(self) -> Any:
        return self._peft.OSFConfig(effective_rank=self.settings.preserved, target_modules=self.targets)

    def begin(self, head: int, batches: Iterable[Batch]) -> None:
        if self._is_adapted:
            self._fold()
        super().begin(head, batches)

    def _fold(self) -> None:
        """Make the weights what the adapters have made of them, and take the adapters out."""
        for name in self.targets:
            layer = self._layer(name)
            layer.merge()
            parent, _, leaf = name.rpartition(".")
            setattr(self.network.get_submodule(parent), leaf, layer.get_base_layer())
        del self.network.peft_config  # by which PEFT knows that a model has adapters
        self._is_adapted = False

    def _layer(self, name: str) -> Any:
        """A target, which has an adapter or not."""
        return self.network.get_submodule(name)

    def _base(self) -> dict[str, Tensor]:
        """The weights that the adapters were made from."""
        return {name: self._layer(name).get_base_layer().weight.detach() for name in self.targets}

    def state_dict(self) -> dict[str, Any]:
        # PEFT keeps the decomposition out of the network's state, so it is made again from what it was of.
        return super().state_dict() | {"base": self._base() if self._is_adapted else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, weight in state["base"].items():
                self._layer(name).weight.copy_(weight)
        super().load_state_dict(state)

    def bytes(self) -> dict[str, int]:
        base = self._base() if self._is_adapted else {}
        return {"decomposed weights": sum(weight.nbytes for weight in base.values())}
