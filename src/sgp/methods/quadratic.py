"""Base class of methods with a quadratic penalty on the change of each parameter: EWC and SI."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sgp.methods.method import Method, make_weak
from sgp.methods.settings import PenaltySettings
from sgp.patterns import find_pattern

P = TypeVar("P", bound=PenaltySettings)


class Quadratic(Method[P]):
    """Method whose loss has the penalty stiffness / 2 * sum_i importance_i (theta_i - anchor_i)^2.

    The penalty's gradient is added to a parameter's gradient as soon as one has been accumulated: once per step, even
    if several backward passes add up, and before anything clips the gradient. A parameter without a gradient in a step
    is left alone, as the optimizer does. Parameters of excluded modules belong to single tasks and have no penalty.

    Steps with learning rate lr diverge where lr * stiffness * importance is above 2, whatever the loss is. An implicit
    step therefore divides the gradient by 1 + lr * stiffness * importance when the optimizer is about to step. For
    plain SGD this is the step with the penalty's gradient at its end instead of its start; it converges to the same
    weights. (If the step gets a closure, which computes the gradient later, steps are explicit.)
    """

    parameter_state_names: ClassVar[tuple[str, ...]] = ("importance", "anchor")

    def __init__(self, network: nn.Module, settings: P, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.importance: dict[str, Tensor] = {}
        self.anchor: dict[str, Tensor] = {}
        # Whether a parameter's gradient was empty when the running backward pass reached it.
        self._is_first: dict[str, bool] = {}
        self._handles: list[RemovableHandle] = []

    @property
    @abstractmethod
    def stiffness(self) -> float:
        """Factor of the penalty."""

    def get_penalized(self) -> dict[str, nn.Parameter]:
        """Return the parameters that have a penalty, by name."""
        return {
            name: parameter
            for name, parameter in self.network.named_parameters()
            if parameter.requires_grad and not find_pattern(name, self.exclude)
        }

    def compute_pull(self, name: str, parameter: Tensor) -> Tensor | None:
        """Compute the penalty's gradient for one parameter; None before the parameter has an importance."""
        if name not in self.importance:
            return None
        return self.importance[name] * (parameter.detach() - self.anchor[name]) * self.stiffness

    def attach(self, optimizer: Optimizer) -> None:
        for handle in self._handles:
            handle.remove()
        before, after = make_weak(self._before_accumulation), make_weak(self._after_accumulation)
        self._handles = []
        for name, parameter in self.get_penalized().items():
            self._handles += [
                parameter.register_hook(partial(before, name)),  # type: ignore[no-untyped-call]
                parameter.register_post_accumulate_grad_hook(partial(after, name)),  # type: ignore[no-untyped-call]
            ]
        if self.settings.penalty_step == "implicit":
            self._handles.append(optimizer.register_step_pre_hook(make_weak(self._divide_gradients)))

    # Both look at the gradient when they run, not at the optimizer's step: that is right for closures that run several
    # times in a step, and for gradients that are thrown away without one.
    def _before_accumulation(self, name: str, gradient: Tensor) -> None:
        before = self.network.get_parameter(name).grad
        self._is_first[name] = before is None or not bool(before.any())

    @torch.no_grad()
    def _after_accumulation(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.add_pull(name, parameter, parameter.grad, is_first=self._is_first.pop(name))

    def add_pull(self, name: str, parameter: Tensor, gradient: Tensor, *, is_first: bool) -> None:
        """Add the penalty's gradient to a parameter's gradient, if it is the first backward pass of the step."""
        pull = self.compute_pull(name, parameter) if is_first else None
        if pull is not None:
            gradient.add_(pull)

    @torch.no_grad()
    def _divide_gradients(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        names = {id(parameter): name for name, parameter in self.get_penalized().items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name in self.importance and parameter.grad is not None:
                    parameter.grad.div_(1 + float(group["lr"]) * self.stiffness * self.importance[name])
