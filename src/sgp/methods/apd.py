"""APD (Yoon et al., ICLR 2020): weights are shared ones under a mask of the task, plus a sparse part of the task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from sgp.methods.method import (
    Batch,
    Method,
    Moment,
    NormStatistics,
    Stateful,
    clone_tensors,
    count_parameters,
    sum_bytes,
)
from sgp.methods.settings import APDFacts, APDSettings
from sgp.patterns import find_pattern

# Random starts of k-means, and the most iterations of each.
RESTARTS = 10
ROUNDS = 100


class Decomposed(Stateful):
    """One weight in the tasks that have been learned.

    Attributes:
        sigma: Shared part, the network's own parameter; [units, ...].
        masks: m of each task, [tasks, units].
        targets: theta* of each task without its group's part, [tasks, units, ...].
        common: Parts of groups, [groups, units, ...].
        groups: Group of each task; -1 for none.
    """

    state_names = ("masks", "targets", "common", "groups")

    def __init__(self, sigma: nn.Parameter) -> None:
        self.sigma = sigma
        self.masks = sigma.new_empty(0, len(sigma))
        self.targets = sigma.new_empty(0, *sigma.shape)
        self.common = sigma.new_empty(0, *sigma.shape)
        self.groups: list[int] = []

    def compute_gate(self, mask: Tensor) -> Tensor:
        """Compute sigmoid(m), in a shape that multiplies sigma."""
        return mask.sigmoid().view(-1, *[1] * (self.sigma.dim() - 1))

    def compute_theta(self, mask: Tensor, tau: Tensor) -> Tensor:
        """Compute sigmoid(m) sigma + tau."""
        return torch.addcmul(tau, self.compute_gate(mask), self.sigma)

    def compute_tau(self, task: int, slack: float) -> Tensor:
        """Compute the best tau of an old task for the current sigma, with slack = l1/approx."""
        return F.softshrink(self._compute_residual(self.targets[task], self.compute_gate(self.masks[task])), slack)

    def _compute_residual(self, target: Tensor, gate: Tensor) -> Tensor:
        return torch.addcmul(target, gate, self.sigma.detach(), value=-1)

    def compute_pull(self, l1: float, approx: float) -> Tensor:
        """Compute the gradient for sigma of sum_j min over tau_j of approx/2 |theta_j - theta_j*|^2 + l1 |tau_j|_1.

        With r = theta_j* - sigmoid(m_j) sigma the minimum over an element of tau_j is approx/2 r^2 up to
        |r| = l1/approx and grows with slope l1 from there.
        """
        total = torch.zeros_like(self.sigma)
        for mask, target in zip(self.masks, self.targets, strict=True):
            gate = self.compute_gate(mask)
            residual = self._compute_residual(target, gate)
            total.addcmul_(residual.clamp_(-l1 / approx, l1 / approx), gate, value=-approx)
        return total

    @torch.no_grad()
    def add_task(self, mask: Tensor, tau: Tensor) -> None:
        """Store a task that has been learned."""
        self.masks = torch.cat([self.masks, mask[None]])
        self.targets = torch.cat([self.targets, self.compute_theta(mask, tau).contiguous()[None]])
        self.groups = [*self.groups, -1]

    @torch.no_grad()
    def form_groups(self, count: int, gap: float, l1: float) -> None:
        """Form groups of tasks anew, and move what the tasks of a group have in common to the group's part."""
        gates = torch.stack([self.compute_gate(mask) for mask in self.masks])
        shares = gates * self.sigma
        taus = self.targets - shares
        for task, group in enumerate(self.groups):
            if group >= 0:
                taus[task] += self.common[group]
        self.groups = cluster(taus.flatten(start_dim=1), count)
        common = self.sigma.new_zeros(count, *self.sigma.shape)
        for group in range(count):
            members = [task for task, own in enumerate(self.groups) if own == group]
            if len(members) > 1:
                high, low = taus[members].amax(dim=0), taus[members].amin(dim=0)
                alike = high - low <= gap
                common[group] = F.hardshrink((high + low) / 2 * alike, l1)
                taus[members] = taus[members] * ~alike
        self.common, self.targets = common, shares + taus


class APD(APDFacts, Method[APDSettings]):
    """Additive parameter decomposition.

    A weight of task t is theta_t = sigmoid(m_t) sigma + tau_t, with sigma shared by all tasks, m_t a number for each
    unit and tau_t sparse. Biases and norm layers are the task's own, and so is its head, unless all tasks share one,
    which is then decomposed like the rest. Task t minimizes

        cross-entropy + weight_decay/2 (|tau_t|^2 + |m_t|^2, and |sigma|^2 if it is the first) + l1 |tau_t|_1
        + sum_{j<t} [approx/2 |theta_j - theta_j*|^2 + l1 |tau_j|_1]

    where sigma and all tau are free and theta_j* is the weight of task j when it was learned. For any sigma the best
    tau_j has a closed form, so the sum is minimized with every tau_j at its best: it costs a gradient for sigma, and no
    tau_j is stored, only theta_j*. Every `group_every` tasks k-means on tau forms groups; in a group, elements of tau
    that are at most `group_gap` apart become one element (max + min)/2 of a common part, which no longer changes.

    Inference takes elements of tau up to l1 for 0. A task is known by its head, or by its number if all tasks share
    one.

    Attributes:
        weights: Decomposed weights by parameter name.
        heads: Head of each learned task.
    """

    # Estimating them would run the network with sigma alone; those that training gathers are the task's own.
    norm_statistics: NormStatistics = "own"
    state_names = ("heads", "_kept", "_current", "_used")

    def __init__(self, network: nn.Module, settings: APDSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        ours = {name: each for name, each in network.named_parameters() if not find_pattern(name, self.exclude)}
        # The first dimension of a weight is its units.
        self.weights = {name: Decomposed(each) for name, each in ours.items() if each.dim() > 1}
        self._plain = {name: each for name, each in ours.items() if each.dim() <= 1}
        # Of the current task, in the order of the names.
        self._tau = nn.ParameterList(torch.zeros_like(each.sigma) for each in self.weights.values())
        self._masks = nn.ParameterList(each.sigma.new_zeros(len(each.sigma)) for each in self.weights.values())
        self._own = nn.ParameterList(each.detach().clone() for each in self._plain.values())
        parts = {"network": network, "tau": self._tau, "masks": self._masks, "own": self._own}
        self._trained = nn.ModuleDict(parts)
        self.heads: list[int] = []
        # Biases, norm layers and stored statistics of each learned task.
        self._kept: list[dict[str, Tensor]] = []
        self._current: int | None = None
        # Parameters of heads that a task has used.
        self._used: list[str] = []

    @property
    def trained_module(self) -> nn.Module:
        return self._trained

    def build_optimizer(self, kind: Callable[..., Optimizer], lr: float) -> Optimizer:
        if self.settings.penalty == "proximal" and kind is not SGD:
            raise ValueError("penalty=proximal requires optimizer=sgd: Adam steps each element at its own rate")
        return super().build_optimizer(kind, lr)

    @torch.no_grad()
    def begin_task(self, head: int, batches: Iterable[Batch]) -> None:
        self._current = head
        for weight, mask, tau in self._list_weights():
            tau.copy_(weight.sigma) if self.settings.tau_start == "shared" else tau.zero_()
            mask.copy_(self.settings.mask_start + torch.randn(len(mask)) / math.sqrt(len(mask)))
        for own, first in zip(self._own, self._plain.values(), strict=True):
            own.copy_(first)

    def _list_weights(self) -> Iterator[tuple[Decomposed, nn.Parameter, nn.Parameter]]:
        """Iterate over the weights with the current task's m and tau."""
        return zip(self.weights.values(), self._masks, self._tau, strict=True)

    def compute_loss(self, batch: Batch, head: int, moment: Moment) -> Tensor:
        inputs, labels = batch
        thetas = [weight.compute_theta(mask, tau) for weight, mask, tau in self._list_weights()]
        return F.cross_entropy(self.run_with(self._name_tensors(thetas, self._own), inputs, head), labels)

    def adjust_gradients(self, moment: Moment, optimizer: Optimizer) -> None:
        for name, parameter in self.network.named_parameters():
            if parameter.grad is not None and find_pattern(name, self.exclude) and name not in self._used:
                self._used = sorted([*self._used, name])
        self._add_penalties()
        for group in optimizer.param_groups:
            group["lr"] *= self.settings.lr_decay**moment.epoch

    def finish_step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> None:
        if self.settings.penalty == "proximal":
            for tau in self._tau:
                tau.copy_(F.softshrink(tau, optimizer.param_groups[0]["lr"] * self.settings.l1))

    def _add_penalties(self) -> None:
        """Add the gradients of all penalties, except for |tau|_1 if it is proximal."""
        l1, decay = self.settings.l1, self.settings.weight_decay
        for weight, mask, tau in self._list_weights():
            sigma = weight.sigma
            if sigma.grad is None or mask.grad is None or tau.grad is None:
                continue  # the task does not use it
            mask.grad.add_(mask, alpha=decay)
            tau.grad.add_(tau, alpha=decay)
            if self.settings.penalty == "subgradient":
                tau.grad.add_(tau.sign(), alpha=l1)
            sigma.grad.add_(weight.compute_pull(l1, self.settings.approx) if self.heads else decay * sigma)

    def compute_logits(self, inputs: Tensor, head: int) -> Tensor:
        return self.run_with(self._get_tensors(head), inputs, head)

    def _get_tensors(self, head: int) -> dict[str, Tensor]:
        """Return the parameters and statistics that a task is run with."""
        if head == self._current:
            l1 = self.settings.l1
            thetas = [each.compute_theta(mask, F.hardshrink(tau, l1)) for each, mask, tau in self._list_weights()]
            return self._name_tensors(thetas, self._own)
        # A head that occurs again belongs to its last task.
        task = max(task for task, of in enumerate(self.heads) if of == head)
        return {name: self._compute_theta(each, task) for name, each in self.weights.items()} | self._kept[task]

    def _name_tensors(self, thetas: Iterable[Tensor], own: Iterable[Tensor]) -> dict[str, Tensor]:
        """Name weights, and biases and norm layers, by the parameters that they replace."""
        return dict(zip([*self.weights, *self._plain], [*thetas, *own], strict=True))

    def _compute_pruned_tau(self, weight: Decomposed, task: int) -> Tensor:
        l1 = self.settings.l1
        return F.hardshrink(weight.compute_tau(task, l1 / self.settings.approx), l1)

    def _compute_theta(self, weight: Decomposed, task: int) -> Tensor:
        theta = weight.compute_theta(weight.masks[task], self._compute_pruned_tau(weight, task))
        group = weight.groups[task]
        return theta if group < 0 else theta + weight.common[group]

    @torch.no_grad()
    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        assert self._current is not None
        for weight, mask, tau in self._list_weights():
            weight.add_task(mask, tau)
        plain = dict(zip(self._plain, self._own, strict=True))
        self._kept.append(clone_tensors(plain | dict(self.network.named_buffers())))
        self.heads.append(self._current)
        self._current = None
        every, tasks = self.settings.group_every, len(self.heads)
        if every and tasks % every == 0:
            count = min(tasks, self.settings.group_centroids * (tasks // every))
            for weight in self.weights.values():
                weight.form_groups(count, self.settings.group_gap, self.settings.l1)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": {name: each.state_dict() for name, each in self.weights.items()}, **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for name, each in self.weights.items():
            each.load_state_dict(state["weights"][name])

    def count_bytes(self) -> dict[str, int]:
        weights = self.weights.values()
        return {
            "targets": sum_bytes(each.targets for each in weights),
            "masks": sum_bytes(each.masks for each in weights),
            "groups": sum_bytes(each.common for each in weights),
            "own": sum_bytes(self._kept),
            "learned part": sum_bytes([self._tau, self._masks, self._own]),
        }

    def compute_capacity(self) -> float:
        """Count the non-zero numbers that inference uses for the tasks so far, in percent of the parameters."""
        used = sum(self.network.get_parameter(name).numel() for name in self._used)
        for weight in self.weights.values():
            tau = sum(int(self._compute_pruned_tau(weight, task).count_nonzero()) for task in range(len(self.heads)))
            used += weight.sigma.numel() + tau + weight.masks.numel() + int(weight.common.count_nonzero())
        used += len(self.heads) * sum(each.numel() for each in self._plain.values())
        return 100 * used / count_parameters(self.network)


def cluster(points: Tensor, count: int) -> list[int]:
    """Return the group of each point by k-means, the best of several random starts. points: [n, d]."""
    # All distances follow from the inner products of the points, so that no iteration reads the points again.
    products = (points @ points.mT).double()
    squares = products.diagonal()
    best, least = [0] * len(points), math.inf
    for _ in range(RESTARTS):
        means = F.one_hot(torch.randperm(len(points))[:count], len(points)).double()
        labels = torch.zeros(0)
        for _ in range(ROUNDS):
            # [n, groups]; means are rows of weights on points.
            distances = squares[:, None] - 2 * products @ means.mT + ((means @ products) * means).sum(dim=1)
            distances[:, means.sum(dim=1) == 0] = math.inf
            previous, labels = labels, distances.argmin(dim=1)
            if torch.equal(previous, labels):
                break
            members = F.one_hot(labels, count).double().mT
            means = members / members.sum(dim=1, keepdim=True).clamp(min=1)
        cost = float(distances.amin(dim=1).sum())
        if cost < least:
            best, least = labels.tolist(), cost
    return best
