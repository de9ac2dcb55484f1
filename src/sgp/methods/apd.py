"""APD (Yoon et al., ICLR 2020): weights are shared ones under a mask of the task, plus a sparse part of the task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from sgp.methods.method import Batch, Method, Moment, NormStatistics
from sgp.methods.settings.apd import APDFacts, APDSettings
from sgp.patterns import find_pattern

# Of k-means.
RESTARTS = 10
ROUNDS = 100


class Decomposed:
    """One weight in the tasks that have been learned.

    Attributes:
        sigma: what they share, the network's own parameter; [units, ...].
        masks: m of each task, [tasks, units].
        targets: theta* of each task without its group's part, [tasks, units, ...].
        common: parts of groups, [groups, units, ...].
        groups: the group of each task; -1 for none.
    """

    def __init__(self, sigma: nn.Parameter) -> None:
        self.sigma = sigma
        self.masks = sigma.new_empty(0, len(sigma))
        self.targets = sigma.new_empty(0, *sigma.shape)
        self.common = sigma.new_empty(0, *sigma.shape)
        self.groups: list[int] = []

    def gate(self, mask: Tensor) -> Tensor:
        """sigmoid(m), in a shape that multiplies sigma."""
        return mask.sigmoid().view(-1, *[1] * (self.sigma.dim() - 1))

    def theta(self, mask: Tensor, tau: Tensor) -> Tensor:
        """sigmoid(m) sigma + tau."""
        return torch.addcmul(tau, self.gate(mask), self.sigma)

    def tau(self, task: int, slack: float) -> Tensor:
        """What is best for an old task as sigma is: its target less its share of sigma, shrunk by l1/approx."""
        left = torch.addcmul(self.targets[task], self.gate(self.masks[task]), self.sigma.detach(), value=-1)
        return F.softshrink(left, slack)

    def pull(self, l1: float, approx: float) -> Tensor:
        """Gradient with respect to sigma of sum_j min over tau_j of approx/2 |theta_j - theta_j*|^2 + l1 |tau_j|_1.

        With r = theta_j* - sigmoid(m_j) sigma the minimum over an element of tau_j is approx/2 r^2 up to
        |r| = l1/approx and grows with slope l1 from there.
        """
        total = torch.zeros_like(self.sigma)
        for mask, target in zip(self.masks, self.targets, strict=True):
            gate = self.gate(mask)
            left = torch.addcmul(target, gate, self.sigma.detach(), value=-1)
            total.addcmul_(left.clamp_(-l1 / approx, l1 / approx), gate, value=-approx)
        return total

    @torch.no_grad()
    def learned(self, mask: Tensor, tau: Tensor) -> None:
        """Take in a task."""
        self.masks = torch.cat([self.masks, mask[None]])
        self.targets = torch.cat([self.targets, self.theta(mask, tau).contiguous()[None]])
        self.groups = [*self.groups, -1]

    @torch.no_grad()
    def consolidate(self, count: int, gap: float, l1: float) -> None:
        """Form groups of tasks anew, and move what is alike in each to a part in common."""
        gates = torch.stack([self.gate(mask) for mask in self.masks])
        shares = gates * self.sigma
        taus = self.targets - shares
        for task, group in enumerate(self.groups):
            if group >= 0:
                taus[task] += self.common[group]
        self.groups = clusters(taus.flatten(start_dim=1), count)
        common = self.sigma.new_zeros(count, *self.sigma.shape)
        for group in range(count):
            members = [task for task, own in enumerate(self.groups) if own == group]
            if len(members) > 1:
                high, low = taus[members].amax(dim=0), taus[members].amin(dim=0)
                alike = high - low <= gap
                common[group] = pruned((high + low) / 2 * alike, l1)
                taus[members] = taus[members] * ~alike
        self.common, self.targets = common, shares + taus


class APD(APDFacts, Method[APDSettings]):
    """Additive parameter decomposition.

    A weight of task t is theta_t = sigmoid(m_t) sigma + tau_t, with sigma shared by all tasks, m_t a number for each
    unit and tau_t sparse. Biases and norm layers are the task's own, and so is its head, unless all tasks share one,
    which is then decomposed like the rest. Task t descends

        cross-entropy + weight_decay/2 (|tau_t|^2 + |m_t|^2, and |sigma|^2 if it is the first) + l1 |tau_t|_1
        + sum_{j<t} [approx/2 |theta_j - theta_j*|^2 + l1 |tau_j|_1]

    where sigma and all tau are free and theta_j* is what task j had. For any sigma the best tau_j has a closed form, so
    the sum is descended with every tau_j at its best: it costs a gradient for sigma, and no tau_j is stored, only
    theta_j*. Every `group_every` tasks k-means on tau forms groups; in a group, elements of tau that are at most
    `group_gap` apart become one element (max + min)/2 of a part in common, which no longer changes.

    Inference takes elements of tau up to l1 for 0. A task is known by its head, or by its number where all share one.
    """

    def __init__(self, network: nn.Module, settings: APDSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        ours = {name: each for name, each in network.named_parameters() if not find_pattern(name, self.exclude)}
        # A weight's units are its first side.
        self.weights = {name: Decomposed(each) for name, each in ours.items() if each.dim() > 1}
        self._plain = {name: each for name, each in ours.items() if each.dim() <= 1}
        # Of the task that is learned, in the order of the names.
        self._tau = nn.ParameterList(torch.zeros_like(each.sigma) for each in self.weights.values())
        self._masks = nn.ParameterList(each.sigma.new_zeros(len(each.sigma)) for each in self.weights.values())
        self._own = nn.ParameterList(each.detach().clone() for each in self._plain.values())
        parts = {"network": network, "tau": self._tau, "masks": self._masks, "own": self._own}
        self._trained = nn.ModuleDict(parts)
        # Of each task that has been learned: its head; biases, norm layers and stored statistics.
        self.heads: list[int] = []
        self._kept: list[dict[str, Tensor]] = []
        self._current: int | None = None
        # Parameters of heads that a task has used.
        self._used: set[str] = set()

    @property
    def trained(self) -> nn.Module:
        return self._trained

    @property
    def statistics(self) -> NormStatistics:
        # Who estimates them runs the network with sigma alone; those that training gathers are of the task.
        return "own"

    def optimizer(self, kind: Callable[..., Optimizer], lr: float) -> Optimizer:
        if self.settings.penalty == "proximal" and kind is not SGD:
            raise ValueError("penalty=proximal goes with optimizer=sgd: Adam steps each element at a rate of its own")
        return super().optimizer(kind, lr)

    @torch.no_grad()
    def begin(self, head: int, batches: Iterable[Batch]) -> None:
        self._current = head
        for weight, tau, mask in zip(self.weights.values(), self._tau, self._masks, strict=True):
            tau.copy_(weight.sigma) if self.settings.tau_start == "shared" else tau.zero_()
            mask.copy_(self.settings.mask_start + torch.randn(len(mask)) / math.sqrt(len(mask)))
        for own, first in zip(self._own, self._plain.values(), strict=True):
            own.copy_(first)

    def loss(self, batch: Batch, head: int, moment: Moment) -> Tensor:
        inputs, labels = batch
        parts = zip(self.weights.items(), self._masks, self._tau, strict=True)
        weights = {name: weight.theta(mask, tau) for (name, weight), mask, tau in parts}
        return F.cross_entropy(self._run(weights | self._named(self._own), inputs, head), labels)

    def step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> float:
        """Gives the cross-entropy, without penalties."""
        optimizer.zero_grad()
        loss = self.loss(batch, head, moment)
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in self.network.named_parameters():
            if parameter.grad is not None and find_pattern(name, self.exclude):
                self._used.add(name)
        self._penalise()
        for group in optimizer.param_groups:
            group["lr"] *= self.settings.lr_decay**moment.epoch
        optimizer.step()
        if self.settings.penalty == "proximal":
            with torch.no_grad():
                for tau in self._tau:
                    tau.copy_(F.softshrink(tau, optimizer.param_groups[0]["lr"] * self.settings.l1))
        return loss.item()

    @torch.no_grad()
    def _penalise(self) -> None:
        """Add the gradients of all but the cross-entropy, and but |tau|_1 if that is proximal."""
        l1, decay = self.settings.l1, self.settings.weight_decay
        for weight, mask, tau in zip(self.weights.values(), self._masks, self._tau, strict=True):
            sigma = weight.sigma
            if sigma.grad is None or mask.grad is None or tau.grad is None:
                continue  # the task does not use it
            mask.grad.add_(mask, alpha=decay)
            tau.grad.add_(tau, alpha=decay)
            if self.settings.penalty == "subgradient":
                tau.grad.add_(tau.sign(), alpha=l1)
            sigma.grad.add_(weight.pull(l1, self.settings.approx) if self.heads else decay * sigma)

    def logits(self, inputs: Tensor, head: int) -> Tensor:
        return self._run(self._answering(head), inputs, head)

    def _run(self, replaced: Mapping[str, Tensor], inputs: Tensor, head: int) -> Tensor:
        out: Tensor = functional_call(self.network, dict(replaced), (inputs, head))
        return out

    def _answering(self, head: int) -> dict[str, Tensor]:
        """Parameters and statistics that answer for a task."""
        if head == self._current:
            masked = zip(self.weights.items(), self._masks, self._tau, strict=True)
            weights = {name: each.theta(mask, pruned(tau, self.settings.l1)) for (name, each), mask, tau in masked}
            return weights | self._named(self._own)
        task = self._task(head)
        return {name: self._theta(each, task) for name, each in self.weights.items()} | self._kept[task]

    def _task(self, head: int) -> int:
        # A head that has come again is that of its last task.
        return max(task for task, of in enumerate(self.heads) if of == head)

    def _pruned_tau(self, weight: Decomposed, task: int) -> Tensor:
        l1 = self.settings.l1
        return pruned(weight.tau(task, l1 / self.settings.approx), l1)

    def _theta(self, weight: Decomposed, task: int) -> Tensor:
        theta = weight.theta(weight.masks[task], self._pruned_tau(weight, task))
        group = weight.groups[task]
        return theta if group < 0 else theta + weight.common[group]

    def _named(self, own: Iterable[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._plain, own, strict=True))

    @torch.no_grad()
    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        assert self._current is not None
        for weight, mask, tau in zip(self.weights.values(), self._masks, self._tau, strict=True):
            weight.learned(mask, tau)
        kept = self._named(self._own) | dict(self.network.named_buffers())
        self._kept.append({name: each.detach().clone() for name, each in kept.items()})
        self.heads.append(self._current)
        self._current = None
        every, tasks = self.settings.group_every, len(self.heads)
        if every and tasks % every == 0:
            count = min(tasks, self.settings.group_centroids * (tasks // every))
            for weight in self.weights.values():
                weight.consolidate(count, self.settings.group_gap, self.settings.l1)

    def state_dict(self) -> dict[str, Any]:
        weights = {
            name: {"masks": each.masks, "targets": each.targets, "common": each.common, "groups": list(each.groups)}
            for name, each in self.weights.items()
        }
        kept = [dict(each) for each in self._kept]
        used = sorted(self._used)
        return {"weights": weights, "heads": list(self.heads), "kept": kept, "current": self._current, "used": used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, each in self.weights.items():
            saved = state["weights"][name]
            each.masks, each.targets, each.common = (saved[part].clone() for part in ("masks", "targets", "common"))
            each.groups = list(saved["groups"])
        self.heads, self._current = list(state["heads"]), state["current"]
        self._kept = [dict(each) for each in state["kept"]]
        self._used = set(state["used"])

    def bytes(self) -> dict[str, int]:
        weights = self.weights.values()
        return {
            "targets": sum(each.targets.nbytes for each in weights),
            "masks": sum(each.masks.nbytes for each in weights),
            "groups": sum(each.common.nbytes for each in weights),
            "own": sum(each.nbytes for kept in self._kept for each in kept.values()),
            "learned part": sum(each.nbytes for part in (self._tau, self._masks, self._own) for each in part),
        }

    def capacity(self) -> float:
        """Numbers other than 0 that inference for the tasks so far uses, in percent of the network's parameters."""
        used = sum(self.network.get_parameter(name).numel() for name in self._used)
        for weight in self.weights.values():
            tau = sum(int(self._pruned_tau(weight, task).count_nonzero()) for task in range(len(self.heads)))
            used += weight.sigma.numel() + tau + weight.masks.numel() + int(weight.common.count_nonzero())
        used += len(self.heads) * sum(each.numel() for each in self._plain.values())
        return 100 * used / sum(each.numel() for each in self.network.parameters())


def pruned(tau: Tensor, threshold: float) -> Tensor:
    """With elements up to a threshold set to 0."""
    return F.hardshrink(tau, threshold)


def clusters(points: Tensor, count: int) -> list[int]:
    """Which of so many groups each point is in, by k-means: the best of several random starts. points: [n, d]."""
    # All distances follow from the products of points, so that no step touches the points again.
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
