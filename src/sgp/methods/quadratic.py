"""Methods that hold each parameter by a spring: what EWC and synaptic intelligence share."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sgp.methods.method import Method, S, beside_parameters
from sgp.patterns import find_pattern


class Quadratic(Method[S]):
    """The loss has a penalty: stiffness / 2 * sum_i importance_i (theta_i - anchor_i)^2.

    Its gradient is added to that of a parameter as soon as one has been accumulated in it: once per step, with
    gradients that several backward passes add up as well, and before anybody clips them. A parameter that a step has no
    gradient for is left alone, as the optimizer does. Parameters of excluded modules belong to single tasks and are not
    held.

    Steps of rate lr diverge where lr * stiffness * importance is above 2, whatever the loss is. So an `implicit` method
    divides the gradient by 1 + lr * stiffness * importance when the optimizer is about to step. For plain SGD that is
    the step that has the penalty's gradient at its end instead of its start; what it converges to is the same. (If the
    step gets a closure, which finds the gradient later, steps are plain ones.)
    """

    def __init__(self, network: nn.Module, settings: S, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.importance: dict[str, Tensor] = {}
        self.anchor: dict[str, Tensor] = {}
        # Whether a parameter's gradient was empty when the running backward pass came to it.
        self._first: dict[str, bool] = {}
        self._handles: list[RemovableHandle] = []

    @property
    @abstractmethod
    def stiffness(self) -> float:
        """Of the penalty."""

    @property
    @abstractmethod
    def implicit(self) -> bool:
        """Whether steps are."""

    def held(self) -> dict[str, nn.Parameter]:
        """The parameters that are held, by name."""
        return {
            name: parameter
            for name, parameter in self.network.named_parameters()
            if parameter.requires_grad and not find_pattern(name, self.exclude)
        }

    def penalty(self) -> Tensor:
        """Its value for the weights as they are, with a graph; training does not need it."""
        total = torch.zeros(())
        for name, parameter in self.held().items():
            if name in self.importance:
                total = total + (self.importance[name] * (parameter - self.anchor[name]).square()).sum()
        return self.stiffness / 2 * total

    def pull(self, name: str, parameter: Tensor) -> Tensor | None:
        """The penalty's gradient for one parameter; None if nothing holds it yet."""
        if name not in self.importance:
            return None
        return self.importance[name] * (parameter.detach() - self.anchor[name]) * self.stiffness

    def attach(self, optimizer: Optimizer) -> None:
        for handle in self._handles:
            handle.remove()
        # A plain reference would be a cycle that keeps the network alive.
        me = weakref.ref(self)
        self._handles = []
        for name, parameter in self.held().items():
            before, after = partial(_before_accumulation, me, name), partial(_after_accumulation, me, name)
            self._handles.append(parameter.register_hook(before))  # type: ignore[no-untyped-call]
            self._handles.append(parameter.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]
        if self.implicit:
            self._handles.append(optimizer.register_step_pre_hook(partial(_before_step, me)))

    def accumulated(self, name: str, parameter: Tensor, *, first: bool) -> None:
        """A backward pass has added to a parameter's gradient; to an empty one if it is the first of its step."""
        pull = self.pull(name, parameter) if first else None
        if pull is not None:
            assert parameter.grad is not None
            parameter.grad.add_(pull)

    @torch.no_grad()
    def _soften(self, optimizer: Optimizer) -> None:
        names = {id(parameter): name for name, parameter in self.held().items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name in self.importance and parameter.grad is not None:
                    parameter.grad.div_(1 + float(group["lr"]) * self.stiffness * self.importance[name])

    def state_dict(self) -> dict[str, Any]:
        return {"importance": dict(self.importance), "anchor": dict(self.anchor)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.importance = beside_parameters(self.network, state["importance"])
        self.anchor = beside_parameters(self.network, state["anchor"])


# Both find whether there is anything in the gradient when they run, not at the optimizer's step: that is right for
# closures that run several times in a step, and for gradients that are thrown away without one.
def _before_accumulation(me: weakref.ref[Quadratic[Any]], name: str, gradient: Tensor) -> None:
    method = me()
    if method is not None:
        before = method.network.get_parameter(name).grad
        method._first[name] = before is None or not bool(before.any())


def _after_accumulation(me: weakref.ref[Quadratic[Any]], name: str, parameter: Tensor) -> None:
    method = me()
    if method is not None:
        with torch.no_grad():
            method.accumulated(name, parameter, first=method._first.pop(name))


def _before_step(me: weakref.ref[Quadratic[Any]], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    method = me()
    if method is not None:
        method._soften(optimizer)
