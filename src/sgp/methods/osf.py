"""OSF, orthogonal subspace fine-tuning (Nayak et al., 2025) of PEFT: the strongest directions of each weight are kept.

The directions come from the weights themselves: before each task every weight is decomposed again, its largest singular
values and their vectors are frozen, and the rest is trained orthogonally to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sgp.methods.adapters import Adapters
from sgp.methods.method import Batch, sum_bytes
from sgp.methods.settings import OSFFacts, OSFSettings


class OSF(OSFFacts, Adapters[OSFSettings]):
    """Trains each linear layer's weight orthogonally to its strongest singular directions."""

    layer_types = (nn.Linear,)

    def _can_adapt(self, layer: nn.Module) -> bool:
        # At least one direction must be preserved.
        assert isinstance(layer, nn.Linear)
        return min(layer.weight.shape) * self.settings.preserved >= 1

    def _build_config(self) -> Any:
        return self._peft.OSFConfig(effective_rank=self.settings.preserved, target_modules=self.targets)

    def begin_task(self, head: int, batches: Iterable[Batch]) -> None:
        if self._is_adapted:
            self._merge_adapters()
        super().begin_task(head, batches)

    def _merge_adapters(self) -> None:
        """Merge the adapters into the weights, and remove them."""
        for name in self.targets:
            layer = self._get_layer(name)
            layer.merge()
            parent, _, leaf = name.rpartition(".")
            setattr(self.network.get_submodule(parent), leaf, layer.get_base_layer())
        del self.network.peft_config  # PEFT takes a model that has it for adapted
        self._is_adapted = False

    def _get_layer(self, name: str) -> Any:
        """Return a target, which may have an adapter."""
        return self.network.get_submodule(name)

    def _get_base_weights(self) -> dict[str, Tensor]:
        """Return the weights that were decomposed."""
        if not self._is_adapted:
            return {}
        return {name: self._get_layer(name).get_base_layer().weight.detach() for name in self.targets}

    def state_dict(self) -> dict[str, Any]:
        # PEFT leaves the decomposition out of the network's state, so it is computed again from the same weights.
        return super().state_dict() | {"base": self._get_base_weights()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for name, weight in state["base"].items():
                self._get_layer(name).weight.copy_(weight)
        super().load_state_dict(state)

    def count_bytes(self) -> dict[str, int]:
        return {"decomposed weights": sum_bytes(self._get_base_weights())}
