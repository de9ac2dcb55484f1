"""EWC (Kirkpatrick et al., PNAS 2017): a penalty on the change of parameters, weighted by Fisher information."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from sgp.methods.fisher import compute_batch_fisher, compute_sample_fisher, preserve_state, use_drawn_labels
from sgp.methods.method import Batch, check_choices, sum_bytes
from sgp.methods.quadratic import PenaltySettings, Quadratic


@dataclass(frozen=True)
class EWCSettings(PenaltySettings):
    """Penalty of EWC, and how its Fisher information is computed."""

    strength: float = 5000.0
    """lambda of the penalty lambda / 2 sum F (theta - theta*)^2, at least 0."""
    fisher: Literal["sample", "batch"] = "sample"
    """Square the gradient of each example, or of each batch as in the published code. The batch form is smaller, by up
    to fisher_batch times."""
    fisher_labels: Literal["true", "drawn"] = "true"
    """true: labels of the data. drawn: labels drawn from the network's own output."""
    fisher_batch: int = 64
    """Number of examples that run through the network at once for the Fisher information, at least 1."""
    fisher_mode: Literal["eval", "train"] = "eval"
    """Mode of the network for the Fisher information; train has dropout on, as in the published code."""
    merge: Literal["separate", "online", "mean"] = "separate"
    """separate: each task has its own Fisher information and anchor. online: sum the Fisher information of all tasks,
    and use the last task's anchor. mean: like online, with the mean over tasks, as in the published code."""
    decay: float = 1.0
    """Factor of the sum of earlier tasks when a new one is added, for merge=online, in [0, 1]."""
    clip_norm: float = math.inf
    """Largest norm of the gradient of all parameters, penalty included, above 0; inf does not clip. The published code
    uses 100, which keeps explicit steps finite."""

    def __post_init__(self) -> None:
        check_choices(self)
        # Written so that NaN fails too.
        if not 0 <= self.strength < float("inf"):
            raise ValueError(f"strength must be at least 0 and finite, got {self.strength}")
        if self.fisher_batch < 1:
            raise ValueError(f"fisher_batch must be at least 1, got {self.fisher_batch}")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must be in [0, 1], got {self.decay}")
        if not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0, got {self.clip_norm}")


class EWC(Quadratic[EWCSettings]):
    """Quadratic penalty whose importances are the Fisher information of earlier tasks."""

    name = "ewc"
    description = "elastic weight consolidation: a penalty on change, weighted by Fisher information"
    Settings: ClassVar[type[EWCSettings]] = EWCSettings
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
