"""EWC (Kirkpatrick et al., PNAS 2017): parameters are held where they were, by their Fisher information."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from sgp.methods.fisher import fisher_of_batches, fisher_of_samples, in_mode, with_drawn_labels
from sgp.methods.method import Batch
from sgp.methods.quadratic import Quadratic
from sgp.methods.settings.ewc import EWCFacts, EWCSettings


class EWC(EWCFacts, Quadratic[EWCSettings]):
    """A quadratic penalty whose importances are Fisher informations."""

    def __init__(self, network: nn.Module, settings: EWCSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.tasks = 0

    @property
    def stiffness(self) -> float:
        return self.settings.strength

    @property
    def implicit(self) -> bool:
        return self.settings.penalty_step == "implicit"

    @property
    def consolidation_batch(self) -> int:
        return self.settings.fisher_batch

    def attach(self, optimizer: Optimizer) -> None:
        super().attach(optimizer)
        if self.settings.clip_norm < math.inf:
            # Registered after the hook of implicit steps, so it clips the gradient that the optimizer uses.
            clip = partial(_clip_gradient, self.settings.clip_norm)
            self._handles.append(optimizer.register_step_pre_hook(clip))

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        parameters = self.held()
        if self.settings.fisher_labels == "drawn":
            log_likelihood = with_drawn_labels(self.network, log_likelihood)
        with in_mode(self.network, training=self.settings.fisher_mode == "train"):
            if self.settings.fisher == "sample":
                fisher = fisher_of_samples(self.network, parameters, batches, log_likelihood)
            else:
                fisher = fisher_of_batches(parameters, batches, log_likelihood)
        with torch.no_grad():
            for name, parameter in parameters.items():
                self._take_in(name, parameter.detach().clone(), fisher[name])
        self.tasks += 1

    def _take_in(self, name: str, weights: Tensor, fisher: Tensor) -> None:
        """Merge one parameter's Fisher information and anchor with those of the tasks before."""
        merge = self.settings.merge
        old = self.importance.get(name, torch.zeros_like(fisher))
        if merge == "separate":
            # F (x - a)^2 + G (x - b)^2 = (F + G) (x - c)^2 + constant, with c the mean of a and b weighted by F and G.
            # So one Fisher information and one anchor hold those of all tasks, exactly.
            total = old + fisher
            share = torch.where(total > 0, fisher / total, 1.0)
            anchor = self.anchor[name].lerp(weights, share) if name in self.anchor else weights
        elif merge == "online":
            total, anchor = self.settings.decay * old + fisher, weights
        else:
            total, anchor = (fisher + self.tasks * old) / (self.tasks + 1), weights
        self.importance[name], self.anchor[name] = total, anchor

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"tasks": self.tasks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.tasks = state["tasks"]

    def bytes(self) -> dict[str, int]:
        return {
            "fisher": sum(tensor.nbytes for tensor in self.importance.values()),
            "anchors": sum(tensor.nbytes for tensor in self.anchor.values()),
        }


def _clip_gradient(clip_norm: float, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Clip the joint gradient of all parameters of an optimizer, before a step without a closure."""
    clip_grad_norm_([parameter for group in optimizer.param_groups for parameter in group["params"]], clip_norm)
