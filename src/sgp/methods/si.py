"""SI (Zenke, Poole & Ganguli, ICML 2017): parameters are held by what their way contributed to the loss."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sgp.methods.method import Batch, beside_parameters
from sgp.methods.quadratic import Quadratic
from sgp.methods.settings.si import SIFacts, SISettings


class SI(SIFacts, Quadratic[SISettings]):
    """A quadratic penalty whose importances are path integrals of the loss.

    While a task is trained, each step adds -g * (change of theta) to a parameter's omega, with g the gradient of the
    loss without the penalty, before any clipping: to first order, what its change took off the loss. After the task,
    Omega += omega / (delta^2 + xi), at least 0, with delta the change over the whole task; the anchors are the weights
    at its end.
    """

    def __init__(self, network: nn.Module, settings: SISettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.path: dict[str, Tensor] = {}
        # Of the running step.
        self._gradients: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}

    @property
    def stiffness(self) -> float:
        return 2 * self.settings.strength

    @property
    def implicit(self) -> bool:
        return self.settings.penalty_step == "implicit"

    def attach(self, optimizer: Optimizer) -> None:
        super().attach(optimizer)
        # Where the task begins is the last one's anchor; the first task begins here.
        for name, parameter in self.held().items():
            if name not in self.anchor:
                self.anchor[name] = parameter.detach().clone()
                self.path[name] = torch.zeros_like(parameter)
        me = weakref.ref(self)

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (method := me()) is not None:
                method._weights = {name: parameter.detach().clone() for name, parameter in method.held().items()}

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (method := me()) is not None:
                method._stepped()

        self._handles += [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    def accumulated(self, name: str, parameter: Tensor, *, first: bool) -> None:
        super().accumulated(name, parameter, first=first)
        assert parameter.grad is not None
        pull = self.pull(name, parameter)
        self._gradients[name] = parameter.grad.clone() if pull is None else parameter.grad - pull

    @torch.no_grad()
    def _stepped(self) -> None:
        for name, parameter in self.held().items():
            gradient, before = self._gradients.get(name), self._weights.get(name)
            if gradient is not None and before is not None:
                self.path[name].addcmul_(gradient, parameter - before, value=-1)
        self._gradients, self._weights = {}, {}

    @torch.no_grad()
    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        for name, parameter in self.held().items():
            if name not in self.path:  # never attached, so nothing is known of its way
                continue
            change = parameter - self.anchor[name]
            gained = self.path[name] / (change.square() + self.settings.damping)
            old = self.importance.get(name, torch.zeros_like(gained))
            self.importance[name] = (old + gained).clamp(min=0)
            self.anchor[name] = parameter.detach().clone()
            self.path[name] = torch.zeros_like(parameter)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"path": dict(self.path)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.path = beside_parameters(self.network, state["path"])

    def bytes(self) -> dict[str, int]:
        return {
            "importances": sum(tensor.nbytes for tensor in self.importance.values()),
            "anchors": sum(tensor.nbytes for tensor in self.anchor.values()),
            "paths": sum(tensor.nbytes for tensor in self.path.values()),
        }
