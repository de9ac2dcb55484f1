"""Base class of methods that train PEFT adapters beside a network's own weights, which stay as they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

from torch import nn

from sgp.methods.method import Batch, Method, NormStatistics, S
from sgp.patterns import find_pattern


class Adapters(Method[S]):
    """Adds adapters to a network when the first task begins, and trains them and the heads.

    Attributes:
        layer_types: Types of the layers that get an adapter.
        targets: Names of the layers that get an adapter.
    """

    layer_types: ClassVar[tuple[type[nn.Module], ...]]

    def __init__(self, network: nn.Module, settings: S, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        try:
            self._peft = import_module("peft")
        except ModuleNotFoundError as error:
            raise ImportError(f'{self.name} needs PEFT: pip install "sgp-torch[peft]"', name="peft") from error
        self.targets = [
            name
            for name, module in network.named_modules()
            if isinstance(module, self.layer_types) and not find_pattern(name, self.exclude) and self._can_adapt(module)
        ]
        if not self.targets:
            kinds = " or ".join(kind.__name__ for kind in self.layer_types)
            raise ValueError(
                f"{self.name} adapts layers of type {kinds}, and {type(network).__name__} has none to adapt"
            )
        self._is_adapted = False

    def _can_adapt(self, layer: nn.Module) -> bool:
        """Return whether a layer of the right type can be adapted; if not, it stays as it is."""
        return True

    @abstractmethod
    def _build_config(self) -> Any:
        """Build PEFT's config for the targets."""

    def begin_task(self, head: int, batches: Iterable[Batch]) -> None:
        if not self._is_adapted:
            self._add_adapters()

    def _add_adapters(self) -> None:
        """Add the adapters; from here on, only they and modules of single tasks are trained."""
        self._peft.inject_adapter_in_model(self._build_config(), self.network)
        for name, parameter in self.network.named_parameters():
            if find_pattern(name, self.exclude):
                parameter.requires_grad_(True)
        self._is_adapted = True

    @property
    def norm_statistics(self) -> NormStatistics:
        return "own" if self._is_adapted else "shared"

    def state_dict(self) -> dict[str, Any]:
        return {"adapted": self._is_adapted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["adapted"]:
            self._add_adapters()
