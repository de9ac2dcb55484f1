"""EWC (Kirkpatrick et al., PNAS 2017): a penalty on the change of parameters, weighted by Fisher information."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from sgp.methods.fisher import compute_batch_fisher, compute_sample_fisher, preserve_state, use_drawn_labels
from sgp.methods.method import Batch, sum_bytes
from sgp.methods.quadratic import Quadratic
from sgp.methods.settings import EWCFacts, EWCSettings


class EWC(EWCFacts, Quadratic[EWCSettings]):
    """Quadratic penalty whose importances are the Fisher information of earlier tasks."""

    state_names = ("tasks",)

    def __init__(self, network: nn.Module, settings: EWCSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.tasks = 0

    @property
    def stiffness(self) -> float:
        return self.settings.strength

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
        parameters = self.get_penalized()
        if self.settings.fisher_labels == "drawn":
            log_likelihood = use_drawn_labels(self.network, log_likelihood)
        with preserve_state(self.network, training=self.settings.fisher_mode == "train"):
            if self.settings.fisher == "sample":
                fisher = compute_sample_fisher(self.network, parameters, batches, log_likelihood)
            else:
                fisher = compute_batch_fisher(parameters, batches, log_likelihood)
        with torch.no_grad():
            for name, parameter in parameters.items():
                self._merge(name, parameter.detach().clone(), fisher[name])
        self.tasks += 1

    def _merge(self, name: str, weights: Tensor, fisher: Tensor) -> None:
        """Merge the Fisher information and anchor of one parameter with those of earlier tasks."""
        merge = self.settings.merge
        old = self.importance.get(name, torch.zeros_like(fisher))
        if merge == "separate":
            # F (x - a)^2 + G (x - b)^2 = (F + G) (x - c)^2 + constant, with c the mean of a and b weighted by F and G.
            # So one Fisher information and one anchor represent all tasks exactly.
            total = old + fisher
            share = torch.where(total > 0, fisher / total, 1.0)
            anchor = self.anchor[name].lerp(weights, share) if name in self.anchor else weights
        elif merge == "online":
            total, anchor = self.settings.decay * old + fisher, weights
        else:
            total, anchor = (fisher + self.tasks * old) / (self.tasks + 1), weights
        self.importance[name], self.anchor[name] = total, anchor

    def count_bytes(self) -> dict[str, int]:
        return {"fisher": sum_bytes(self.importance), "anchors": sum_bytes(self.anchor)}


def _clip_gradient(clip_norm: float, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Clip the joint gradient of all parameters of an optimizer, before a step without a closure."""
    clip_grad_norm_([parameter for group in optimizer.param_groups for parameter in group["params"]], clip_norm)
