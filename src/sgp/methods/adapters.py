"""What methods have in common that train adapters of PEFT beside a network's own weights, which stay as they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

from torch import nn

from sgp.methods.method import Batch, Method, NormStatistics, S
from sgp.patterns import find_pattern


class Adapters(Method[S]):
    """Puts adapters into a network when the first task begins, and trains them and the heads.

    Attributes:
        layers: types of layers that get one.
    """

    layers: ClassVar[tuple[type[nn.Module], ...]]

    def __init__(self, network: nn.Module, settings: S, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        try:
            self._peft = import_module("peft")
        except ModuleNotFoundError as error:
            raise ImportError(f'{self.name} needs PEFT: pip install "sgp-torch[peft]"', name="peft") from error
        self.targets = [
            name
            for name, module in network.named_modules()
            if isinstance(module, self.layers) and not find_pattern(name, self.exclude) and self._fits(module)
        ]
        if not self.targets:
            kinds = " or ".join(layer.__name__ for layer in self.layers)
            raise ValueError(
                f"{self.name} adapts layers of type {kinds}, and {type(network).__name__} has none to adapt"
            )
        self._is_adapted = False

    def _fits(self, layer: nn.Module) -> bool:
        """Whether a layer of the right type can be adapted; one that cannot stays as it is."""
        return True

    @abstractmethod
    def _config(self) -> Any:
        """Of PEFT, for the targets."""

    def begin(self, head: int, batches: Iterable[Batch]) -> None:
        if not self._is_adapted:
            self._adapt()

    def _adapt(self) -> None:
        """Put the adapters in; only they and what belongs to single tasks can be trained from here on."""
        self._peft.inject_adapter_in_model(self._config(), self.network)
        for name, parameter in self.network.named_parameters():
            if find_pattern(name, self.exclude):
                parameter.requires_grad_(True)
        self._is_adapted = True

    @property
    def statistics(self) -> NormStatistics:
        return "own" if self._is_adapted else "one"

    def state_dict(self) -> dict[str, Any]:
        return {"adapted": self._is_adapted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["adapted"]:
            self._adapt()
