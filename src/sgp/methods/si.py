"""SI (Zenke, Poole & Ganguli, ICML 2017): a penalty on change, weighted by what a parameter contributed to the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sgp.methods.method import Batch, clone_tensors, make_weak, sum_bytes
from sgp.methods.quadratic import Quadratic
from sgp.methods.settings import SIFacts, SISettings


class SI(SIFacts, Quadratic[SISettings]):
    """Quadratic penalty whose importances are path integrals of the loss.

    While a task is trained, each step adds -g * (change of theta) to a parameter's omega, with g the gradient of the
    loss without the penalty, before any clipping: to first order, this is how much the parameter's change reduced the
    loss. After the task, Omega += omega / (delta^2 + xi), at least 0, with delta the change over the whole task; the
    anchors are the weights at the end of the task.
    """

    parameter_state_names = (*Quadratic.parameter_state_names, "path")

    def __init__(self, network: nn.Module, settings: SISettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.path: dict[str, Tensor] = {}
        # Gradients without the penalty, and weights before the running step.
        self._gradients: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}

    @property
    def stiffness(self) -> float:
        return 2 * self.settings.strength

    def attach(self, optimizer: Optimizer) -> None:
        super().attach(optimizer)
        # A task begins at the anchor of the task before; the first task begins here.
        for name, parameter in self.get_penalized().items():
            if name not in self.anchor:
                self.anchor[name] = parameter.detach().clone()
                self.path[name] = torch.zeros_like(parameter)
        self._handles += [
            optimizer.register_step_pre_hook(make_weak(self._before_step)),
            optimizer.register_step_post_hook(make_weak(self._after_step)),
        ]

    def add_pull(self, name: str, parameter: Tensor, gradient: Tensor, *, is_first: bool) -> None:
        super().add_pull(name, parameter, gradient, is_first=is_first)
        pull = self.compute_pull(name, parameter)
        self._gradients[name] = gradient.clone() if pull is None else gradient - pull

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._weights = clone_tensors(self.get_penalized())

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for name, parameter in self.get_penalized().items():
            gradient, before = self._gradients.get(name), self._weights.get(name)
            if gradient is not None and before is not None:
                self.path[name].addcmul_(gradient, parameter - before, value=-1)
        self._gradients, self._weights = {}, {}

    @torch.no_grad()
    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        for name, parameter in self.get_penalized().items():
            if name not in self.path:  # never attached, so its path is unknown
                continue
            change = parameter - self.anchor[name]
            gained = self.path[name] / (change.square() + self.settings.damping)
            old = self.importance.get(name, torch.zeros_like(gained))
            self.importance[name] = (old + gained).clamp(min=0)
            self.anchor[name] = parameter.detach().clone()
            self.path[name] = torch.zeros_like(parameter)

    def count_bytes(self) -> dict[str, int]:
        parts = {"importances": self.importance, "anchors": self.anchor, "paths": self.path}
        return {use: sum_bytes(tensors) for use, tensors in parts.items()}
