"""GPM (Saha, Garg & Roy, ICLR 2021): no step along any direction that an earlier task's inputs span."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sgp.methods.method import Batch, Method, NormStatistics
from sgp.methods.settings.gpm import GPMFacts, GPMSettings
from sgp.patterns import check_patterns, find_pattern
from sgp.projection import GradientMemory, Numerics
from sgp.projection.gram import InputGram
from sgp.projection.hook import OptimizerHook
from sgp.projection.modes import Mode
from sgp.projection.scan import Scan
from sgp.projection.subspace import Bases, Choice, find_minimal_rank

N = TypeVar("N", int, float)
# A curve over the bases of a layer is written down at so many of them.
POINTS = 17
# So many texts run through the network at once.
LOT = 64
# Singular values below this share of the largest are rounding.
NOISE = 1e-6


class WatchedMemory(GradientMemory):
    """A gradient memory that remembers how strong the last task was along each direction.

    Attributes:
        spectra: Singular values of the task by layer: along old bases (Eq. 6, 7) and of what these leave (Eq. 4).
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._spectrum_of: dict[int, tuple[Bases, Tensor]] = {}

    @property
    def spectra(self) -> dict[str, Tensor]:
        alive = {id(subspace) for subspace in self.subspaces.values()}
        self._spectrum_of = {key: pair for key, pair in self._spectrum_of.items() if key in alive}
        found = {name: self._spectrum_of.get(id(subspace)) for name, subspace in self.subspaces.items()}
        return {name: pair[1] for name, pair in found.items() if pair is not None}

    def grow_bases(self, bases: Bases, gram: InputGram, threshold: float, choose: Choice | None = None) -> Bases:
        spectrum = torch.zeros(0)

        def observe(old: Tensor, new: Tensor, total: Tensor, threshold: float) -> Tensor:
            nonlocal spectrum
            spectrum = torch.cat([old, new], dim=-1).flatten().sqrt()
            return find_minimal_rank(new, total, threshold)

        grown = super().grow_bases(bases, gram, threshold, choose or observe)
        if len(spectrum):
            self._spectrum_of[id(grown)] = grown, spectrum
        return grown


@dataclass(frozen=True)
class _Lots:
    """Texts in lots of like length, so that little padding is computed: what one gives does not depend on others.

    Attributes:
        batches: of texts.
        token_mask: which positions of texts are no padding.
        samples: how many texts there are to be.
    """

    batches: Iterable[Batch]
    token_mask: Callable[[Tensor], Tensor]
    samples: int

    def __iter__(self) -> Iterator[Batch]:
        left = self.samples
        for inputs, labels in self.batches:
            inputs, labels = inputs[:left], labels[:left]
            left -= len(labels)
            for rows in torch.split(self.token_mask(inputs).sum(1).argsort(stable=True), LOT):
                yield inputs[rows], labels[rows]
            if left == 0:
                return


class GPM(GPMFacts, Method[GPMSettings]):
    """A gradient memory in which every basis is blocked."""

    Memory: ClassVar[type[GradientMemory]] = WatchedMemory

    def __init__(self, network: nn.Module, settings: GPMSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        start, step = settings.threshold, settings.threshold_step
        self.memory = self.Memory(
            network,
            threshold={name: partial(_threshold, value, step) for name, value in start.items()}
            if isinstance(start, dict)
            else partial(_threshold, start, step),
            alpha=self._alpha(settings),
            exclude=exclude,
            bias=settings.bias,
            rest=self._rest(settings),
            numerics=Numerics(settings.first_rank, settings.truncation, settings.orthogonalise),
            # The run's own checkpoint has the weights.
            anchor=False,
        )
        self._hook: OptimizerHook | None = None
        self._mode: Mode = "auto"
        self._steps = 0  # of optimizers before the one that is attached
        if isinstance(settings.memory_samples, dict):  # better now than after a task has been trained
            layers = [layer.layer for layer in self.memory.capacity().layers]
            check_patterns(network, settings.memory_samples, "memory_samples", layers)
            for layer in layers:
                if not find_pattern(layer, list(settings.memory_samples)):
                    raise ValueError(f"memory_samples: no pattern matches the layer {layer!r}; add one, such as '*'")

    @staticmethod
    def _alpha(settings: GPMSettings) -> float:
        return math.inf

    @staticmethod
    def _rest(settings: GPMSettings) -> Literal["freeze", "free"]:
        return "freeze"

    def attach(self, optimizer: Optimizer) -> None:
        if self._hook is not None:
            self._steps = self._hook.steps
        with warnings.catch_warnings():
            if self._mode == "gradient":  # asked for, so that it forgets is no news
                warnings.filterwarnings("ignore", message="mode='gradient'", category=UserWarning)
            self._hook = self.memory.attach(optimizer, mode=self._mode, every=self.settings.project_every)
        self._hook.steps = self._steps  # counted over the whole run

    def project_gradients(self) -> None:
        if self.settings.project_every > 1:
            raise ValueError(f"project_every must be 1 to project every gradient, got {self.settings.project_every}")
        self._mode = "gradient"

    def settle(self) -> None:
        if self._hook is not None:
            self._hook.flush()

    @property
    def statistics(self) -> NormStatistics:
        return "each" if self.memory.tasks and self.memory.rules.rest == "freeze" else "one"

    @property
    def consolidation_batch(self) -> int:
        # All at once: where BatchNorm divides by the batch's own statistics they are those of this one batch.
        return max(_values(self.settings.memory_samples))

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        with warnings.catch_warnings():
            # Runs report the free share of every layer after every task.
            warnings.filterwarnings("ignore", message="nearly all of the capacity is blocked", category=UserWarning)
            self.memory.update(
                self._in_lots(batches),
                samples=self.settings.memory_samples,
                forward=log_likelihood,
                mask=self._mask,
                # After a resume the training steps were those of another process.
                allow_unattached=True,
                # Every process has all examples, which run through the network at once.
                distributed=False,
            )

    def _in_lots(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        token_mask, samples = getattr(self.network, "token_mask", None), self.settings.memory_samples
        # Where layers want different numbers of texts, each takes the first ones, which must not be the short ones.
        return batches if token_mask is None or isinstance(samples, dict) else _Lots(batches, token_mask, samples)

    def _mask(self, batch: Batch) -> Tensor | None:
        """Padding does not count, if the network knows of any."""
        mask = getattr(self.network, "token_mask", None)
        return None if mask is None else mask(batch[0])

    def state_dict(self) -> dict[str, Any]:
        state = self.memory.state_dict()
        if self.settings.project_every > 1:  # where it is of no use it would have all bases written at every checkpoint
            state["steps"] = self._steps if self._hook is None else self._hook.steps
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.memory.load_state_dict(state)
        self._steps = state.get("steps", 0)

    def bytes(self) -> dict[str, int]:
        spaces = {id(space): space for space in self.memory.subspaces.values()}.values()
        states = [space.state_dict() for space in spaces]
        basis = sum(t.nbytes for state in states for name, t in state.items() if name in ("basis", "scale", "tokens"))
        importance = sum(space.importance.nbytes for space in spaces)
        return {"bases": basis} | ({} if math.isinf(self.memory.alpha) else {"importances": importance})

    def free(self) -> dict[str, float]:
        return {layer.layer: layer.free for layer in self.memory.capacity().layers}

    def bases(self) -> dict[str, dict[str, Any]]:
        spectra = self.memory.spectra if isinstance(self.memory, WatchedMemory) else {}
        found: dict[str, dict[str, Any]] = {}
        for layer in self.memory.capacity().layers:
            told = found[layer.layer] = {"count": layer.bases, "of": layer.dimension, "blocked": layer.blocked}
            space = self.memory.subspaces.get(layer.layer)
            if space is not None and not math.isinf(self.memory.alpha):
                # Beyond a group's rank importances are 0.
                told["importances"] = curve(space.importance.flatten(), torch.linspace(1, layer.bases, POINTS))
            if layer.layer in spectra:
                sigma = spectra[layer.layer] / spectra[layer.layer].max()
                sigma = sigma[sigma > NOISE]
                told["singular values"] = curve(sigma, torch.logspace(0, math.log10(len(sigma) or 1), POINTS))
        return found


def curve(values: Tensor, positions: Tensor) -> list[tuple[int, float]]:
    """Values in falling order at some positions, from 1: enough to draw them all."""
    falling = values.sort(descending=True).values
    at = sorted({round(position) for position in positions.tolist()}) if len(falling) else []
    return [(position, float(f"{falling[position - 1]:.4g}")) for position in at]


def refuse_embeddings(method: str, scan: Scan) -> None:
    """Raise if an embedding is protected, for methods that compute with bases that are vectors."""
    for name, layer in scan.layers.items():
        if layer.layer_type.is_lookup:
            raise TypeError(f"{name!r} is an embedding, whose bases are tokens, and {method} has no form for those")


def _threshold(start: float, step: float, task: int) -> float:
    """Of the task at a position, from 0."""
    return min(1.0, start + step * task)


def _values(setting: N | dict[str, N]) -> list[N]:
    """What a setting says of any layer."""
    return list(setting.values()) if isinstance(setting, dict) else [setting]
