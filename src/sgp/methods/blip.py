"""BLIP (Shi et al., CVPR 2021): each parameter is a number with a few bits, of which each task freezes the first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from sgp.methods.fisher import compute_sample_fisher, preserve_state, use_drawn_labels
from sgp.methods.method import Batch, Method, NormStatistics, make_weak, sum_bytes
from sgp.methods.settings import BLIPFacts, BLIPSettings
from sgp.projection.norm_stats import FrozenNormStatistics
from sgp.projection.scan import Scan, ScanRules, scan_model

BIAS_BOUND = 1.0


@dataclass(frozen=True)
class _Scale:
    """Range and prior of one parameter.

    Attributes:
        bound: Largest absolute value.
        prior: Fisher information before any task.
    """

    bound: float
    prior: float


class BLIP(BLIPFacts, Method[BLIPSettings]):
    """Freezes the first bits of each weight and bias of linear layers and convolutions.

    A parameter is a fraction of its bound, |theta| <= bound (1 - 2^-max_bits). With b > 0 frozen bits it stays within
    bound 2^-b of where the last task left it, after each step of any optimizer. After task t, from 0,

        IG     = 1/2 log2((F + (t + 1) F_old) / ((t + 2) F_old))      the information that the task gave, in bits
        b     := min(b + max(0, ceil(IG)), max_bits)
        theta := round(theta / bound 2^b) / 2^b bound                 see `unfrozen` where b is 0
        F_old := (F + (t + 1) F_old) / (t + 2)                        at first fisher_prior n

    with F the task's Fisher information at the weights before they are rounded. Excluded modules belong to single
    tasks and stay as they are. Everything else that trains (norm layers and their stored statistics) stays as the first
    task leaves it.

    Attributes:
        tasks: Number of learned tasks.
        bits: b of each parameter, once a task has been learned.
        fisher: F_old of each parameter.
        anchor: Parameters after the last task.
    """

    state_names = ("tasks",)
    parameter_state_names = ("bits", "fisher", "anchor")

    def __init__(self, network: nn.Module, settings: BLIPSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.tasks = 0
        self.bits: dict[str, Tensor] = {}
        self.fisher: dict[str, Tensor] = {}
        self.anchor: dict[str, Tensor] = {}
        # Least and largest value of each parameter while a task is trained; computed at its first step.
        self._ranges: dict[str, tuple[Tensor, Tensor]] | None = None
        self._statistics = FrozenNormStatistics()
        self._statistics.users.add(self)
        self._handles: list[RemovableHandle] = []
        for name in self._compute_scales(self._scan()):
            dtype = network.get_parameter(name).dtype
            most = round(-math.log2(torch.finfo(dtype).eps))
            if settings.max_bits > most:
                raise ValueError(f"max_bits must be at most {most} for {name!r} ({dtype}), got {settings.max_bits}")

    def attach(self, optimizer: Optimizer) -> None:
        for handle in self._handles:
            handle.remove()
        self._ranges = None
        if self.tasks == 0:
            self.clamp_parameters()
        self._handles = [optimizer.register_step_post_hook(make_weak(self.clamp_parameters))]

    @property
    def norm_statistics(self) -> NormStatistics:
        return "per-task" if self.tasks else "shared"

    @property
    def consolidation_batch(self) -> int:
        return self.settings.fisher_batch

    @torch.no_grad()
    def clamp_parameters(self, *_: Any) -> None:
        """Bring every parameter back into its range. It takes, and ignores, the arguments of an optimizer hook."""
        if self._ranges is None:
            self._ranges = self._compute_ranges()
        for name, (least, most) in self._ranges.items():
            self.network.get_parameter(name).clamp_(least, most)
        self._statistics.restore()

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        scan = self._scan()
        scales = self._compute_scales(scan)
        parameters = {name: self.network.get_parameter(name) for name in scales}
        if self.settings.fisher_labels == "drawn":
            log_likelihood = use_drawn_labels(self.network, log_likelihood)
        with preserve_state(self.network, training=False):
            some = islice(batches, self.settings.fisher_batches)
            fisher = compute_sample_fisher(self.network, parameters, some, log_likelihood)
        for name, values in fisher.items():
            if not values.isfinite().all():
                raise ValueError(f"the Fisher information of {name!r} is not finite: lower the learning rate")
        with torch.no_grad():
            for name, parameter in parameters.items():
                self._freeze_bits(name, parameter, scales[name], fisher[name])
        for name in self._list_frozen(scan):
            self.anchor[name] = self.network.get_parameter(name).detach().clone()
        self.tasks += 1
        self._ranges = None
        self._freeze_statistics(scan)

    def _freeze_bits(self, name: str, parameter: Tensor, scale: _Scale, fisher: Tensor) -> None:
        """Round a parameter after a task, and update its bits and Fisher information."""
        old = self.fisher.get(name, torch.full_like(fisher, scale.prior))
        merged = (fisher + (self.tasks + 1) * old) / (self.tasks + 2)
        gain = (0.5 * torch.log2(merged / old)).ceil().clamp(0, self.settings.max_bits).to(torch.uint8)
        bits = (self.bits.get(name, 0) + gain).clamp(max=self.settings.max_bits)
        steps = _compute_powers(bits, parameter)
        rounded = (parameter / scale.bound * steps).round() / steps * scale.bound
        without = parameter if self.settings.unfrozen == "keep" else torch.zeros_like(parameter)
        parameter.copy_(torch.where(bits == 0, without, rounded))
        self.bits[name], self.fisher[name], self.anchor[name] = bits, merged, parameter.detach().clone()

    def _compute_ranges(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the least and the largest value of each parameter's entries while a task is trained."""
        scan, ranges = self._scan(), {}
        for name, scale in self._compute_scales(scan).items():
            limit = self.network.get_parameter(name).new_tensor(scale.bound * (1 - 0.5**self.settings.max_bits))
            ranges[name] = (-limit, limit)
            if name in self.bits:
                anchor, bits = self.anchor[name], self.bits[name]
                # Without a frozen bit it may go anywhere, also from where `unfrozen` kept it.
                reach = torch.where(bits == 0, 2.0, 1 / _compute_powers(bits, anchor)) * scale.bound
                ranges[name] = ((anchor - reach).clamp(min=-limit), (anchor + reach).clamp(max=limit))
        frozen = [name for name in self._list_frozen(scan) if name in self.anchor]
        return ranges | {name: (self.anchor[name], self.anchor[name]) for name in frozen}

    def _scan(self) -> Scan:
        return scan_model(self.network, ScanRules(tuple(self.exclude)))

    def _compute_scales(self, scan: Scan) -> dict[str, _Scale]:
        """Return the range and prior of every parameter that has bits, by name."""
        found = {}
        for layer in scan.layers.values():
            groups, outputs, inputs = layer.block.view_matrix(layer.weight.tensor).shape
            n = inputs if self.settings.fan == "in" else max(inputs, groups * outputs)
            found[layer.weight.name] = _Scale(self.settings.bound / math.sqrt(n), self.settings.fisher_prior * n)
            if layer.bias is not None:
                found[layer.bias.name] = _Scale(BIAS_BOUND, self.settings.fisher_prior * n)
        return found

    def _list_frozen(self, scan: Scan) -> list[str]:
        """Return the names of all other parameters that train."""
        return [name for name in scan.frozen if self.network.get_parameter(name).requires_grad]

    def _freeze_statistics(self, scan: Scan) -> None:
        self._statistics.freeze({name: self.network.get_submodule(name) for name in scan.norm_modules})

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"statistics": self._statistics.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._statistics.load_state_dict(state["statistics"], self.network)
        super().load_state_dict(state)
        self._ranges = None
        if self.tasks:
            self._freeze_statistics(self._scan())

    def count_bytes(self) -> dict[str, int]:
        parts = {"bits": self.bits, "fisher": self.fisher, "anchors": self.anchor}
        parts |= {"statistics": frozen} if (frozen := self._statistics.state_dict()) else {}
        return {part: sum_bytes(tensors) for part, tensors in parts.items()}

    def measure_free(self) -> dict[str, float]:
        shares = {name: 1 - float(bits.float().mean()) / self.settings.max_bits for name, bits in self.bits.items()}
        return {name: shares.get(layer.weight.name, 1.0) for name, layer in self._scan().layers.items()}


def _compute_powers(bits: Tensor, like: Tensor) -> Tensor:
    """Compute 2^b for each b from a table, since torch's powers may be off in their last bit."""
    return like.new_tensor([2.0**b for b in range(int(bits.max()) + 1)])[bits.int()]
