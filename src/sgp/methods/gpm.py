"""GPM (Saha, Garg & Roy, ICLR 2021): no step along any direction that an earlier task's inputs span."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sgp.methods.layer_settings import get_value, list_values, map_values
from sgp.methods.method import Batch, Method, NormStatistics
from sgp.methods.settings import GPMFacts, GPMSettings
from sgp.patterns import check_patterns
from sgp.projection import GradientMemory, Numerics
from sgp.projection.gram import InputGram
from sgp.projection.hook import OptimizerHook
from sgp.projection.layer import ProtectedLayer
from sgp.projection.modes import Mode
from sgp.projection.subspace import Bases, Choice, find_minimal_rank

# A curve over a layer's bases is logged at this many of them.
POINTS = 17
# Number of texts that run through the network at once.
TEXTS_PER_BATCH = 64
# Singular values below this share of the largest are rounding.
NOISE = 1e-6


class AnnotatedMemory(GradientMemory):
    """Gradient memory that keeps a note with the bases of a layer, from the update that made them."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._notes: dict[int, tuple[Bases, Any]] = {}

    def _add_note(self, bases: Bases, note: Any) -> None:
        self._notes[id(bases)] = bases, note

    def _get_notes(self) -> dict[str, Any]:
        """Return the notes by layer, and drop those of bases that are not in use any more."""
        in_use = {id(bases) for bases in self.subspaces.values()}
        self._notes = {key: pair for key, pair in self._notes.items() if key in in_use}
        return {name: self._notes[id(bases)][1] for name, bases in self.subspaces.items() if id(bases) in self._notes}

    def clear_notes(self) -> None:
        """Drop all notes."""
        self._notes.clear()


class SpectrumMemory(AnnotatedMemory):
    """Gradient memory that keeps the strength of the last task along each direction.

    Attributes:
        spectra: Singular values of the task by layer: along old bases (Eq. 6, 7), and of the residual (Eq. 4).
    """

    @property
    def spectra(self) -> dict[str, Tensor]:
        return self._get_notes()

    def grow_bases(self, bases: Bases, gram: InputGram, threshold: float, choose: Choice | None = None) -> Bases:
        spectrum = torch.zeros(0)

        def observe(old: Tensor, new: Tensor, total: Tensor, threshold: float) -> Tensor:
            nonlocal spectrum
            spectrum = torch.cat([old, new], dim=-1).flatten().sqrt()
            return find_minimal_rank(new, total, threshold)

        grown = super().grow_bases(bases, gram, threshold, choose or observe)
        if len(spectrum):
            self._add_note(grown, spectrum)
        return grown


class GPM(GPMFacts, Method[GPMSettings]):
    """Gradient memory whose bases are blocked entirely."""

    Memory: ClassVar[type[GradientMemory]] = SpectrumMemory

    def __init__(self, network: nn.Module, settings: GPMSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.memory = self.Memory(
            network,
            threshold=map_values(settings.threshold, partial(_schedule_threshold, settings.threshold_step)),
            alpha=self.alpha,
            exclude=exclude,
            bias=settings.bias,
            rest=self.rest,
            numerics=Numerics(settings.first_rank, settings.truncation, settings.orthogonalise),
            gram="float64",
            # The run's own checkpoint has the weights.
            anchor=False,
        )
        self._hook: OptimizerHook | None = None
        self._mode: Mode = "auto"
        self._steps = 0  # of earlier optimizers
        if isinstance(settings.memory_samples, dict):  # fail now instead of after a task has been trained
            layers = [layer.layer for layer in self.memory.capacity().layers]
            check_patterns(network, settings.memory_samples, "memory_samples", layers)
            for layer in layers:
                get_value("memory_samples", settings.memory_samples, layer)

    @property
    def alpha(self) -> float:
        """Scale coefficient of the memory."""
        return math.inf

    @property
    def rest(self) -> Literal["freeze", "free"]:
        """Whether the memory freezes or frees parameters of layers without bases."""
        return "freeze"

    def attach(self, optimizer: Optimizer) -> None:
        if self._hook is not None:
            self._steps = self._hook.steps
        with warnings.catch_warnings():
            if self._mode == "gradient":  # on request, so the warning that it forgets is not needed
                warnings.filterwarnings("ignore", message="mode='gradient'", category=UserWarning)
            self._hook = self.memory.attach(optimizer, mode=self._mode, every=self.settings.project_every)
        self._hook.steps = self._steps  # counted over the whole run

    def project_gradients(self) -> None:
        if self.settings.project_every > 1:
            raise ValueError(f"project_every must be 1 to project every gradient, got {self.settings.project_every}")
        self._mode = "gradient"

    def finalize_weights(self) -> None:
        if self._hook is not None:
            self._hook.flush()

    @property
    def norm_statistics(self) -> NormStatistics:
        return "per-task" if self.memory.tasks and self.memory.rules.rest == "freeze" else "shared"

    @property
    def consolidation_batch(self) -> int:
        # One batch, so that BatchNorm divides by the statistics of all examples if it uses those of the batch.
        return max(list_values(self.settings.memory_samples))

    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        with warnings.catch_warnings():
            # Runs report the bases and the free share of every layer after every task.
            warnings.filterwarnings("ignore", message="nearly all of the capacity is blocked", category=UserWarning)
            warnings.filterwarnings("ignore", message="one direction has nearly all", category=UserWarning)
            self.memory.update(
                self._split_texts(batches),
                samples=self.settings.memory_samples,
                forward=log_likelihood,
                mask=self._get_mask,
                # After a resume the training steps were those of another process.
                allow_unattached=True,
                # Every process has all examples, which run through the network at once.
                distributed=False,
            )

    def _split_texts(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        token_mask, samples = getattr(self.network, "token_mask", None), self.settings.memory_samples
        # If layers need different numbers of texts, each takes the first ones, which must not be the short ones.
        if token_mask is None or isinstance(samples, dict):
            return batches
        return sort_texts(batches, token_mask, samples)

    def _get_mask(self, batch: Batch) -> Tensor | None:
        """Return which positions are no padding, if the network has padding."""
        token_mask = getattr(self.network, "token_mask", None)
        return None if token_mask is None else token_mask(batch[0])

    def state_dict(self) -> dict[str, Any]:
        state = self.memory.state_dict()
        if self.settings.project_every > 1:  # otherwise it would rewrite all bases at every checkpoint for nothing
            state["steps"] = self._steps if self._hook is None else self._hook.steps
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.memory.load_state_dict(state)
        self._steps = state.get("steps", 0)

    def count_bytes(self) -> dict[str, int]:
        spaces = {id(space): space for space in self.memory.subspaces.values()}.values()
        states = [space.state_dict() for space in spaces]
        basis = sum(t.nbytes for state in states for name, t in state.items() if name in ("basis", "scale", "tokens"))
        importance = sum(space.importance.nbytes for space in spaces)
        return {"bases": basis} | ({} if math.isinf(self.memory.alpha) else {"importances": importance})

    def measure_free(self) -> dict[str, float]:
        return {layer.layer: layer.free for layer in self.memory.capacity().layers}

    def describe_bases(self) -> dict[str, dict[str, Any]]:
        spectra = self.memory.spectra if isinstance(self.memory, SpectrumMemory) else {}
        found: dict[str, dict[str, Any]] = {}
        for layer in self.memory.capacity().layers:
            values = found[layer.layer] = {"count": layer.bases, "of": layer.dimension, "blocked": layer.blocked}
            space = self.memory.subspaces.get(layer.layer)
            if space is not None and not math.isinf(self.memory.alpha):
                # Beyond a group's rank importances are 0.
                values["importances"] = sample_curve(space.importance.flatten(), torch.linspace(1, layer.bases, POINTS))
            if layer.layer in spectra:
                sigma = spectra[layer.layer] / spectra[layer.layer].max()
                sigma = sigma[sigma > NOISE]
                positions = torch.logspace(0, math.log10(len(sigma) or 1), POINTS)
                values["singular values"] = sample_curve(sigma, positions)
        return found


def sort_texts(batches: Iterable[Batch], token_mask: Callable[[Tensor], Tensor], samples: int) -> list[Batch]:
    """Return texts in batches of similar length, so that little padding is computed: a text's output is its own affair.

    Args:
        batches: Batches of texts.
        token_mask: Function that returns which positions of texts are no padding.
        samples: Number of texts, of which the first ones are taken.
    """
    found: list[Batch] = []
    for inputs, labels in batches:
        inputs, labels = inputs[:samples], labels[:samples]
        samples -= len(labels)
        order = token_mask(inputs).sum(1).argsort(stable=True)
        found += [(inputs[rows], labels[rows]) for rows in torch.split(order, TEXTS_PER_BATCH)]
        if samples == 0:
            break
    return found


def sample_curve(values: Tensor, positions: Tensor) -> list[tuple[int, float]]:
    """Sort values in descending order and return those at some positions, from 1."""
    descending = values.sort(descending=True).values.tolist()
    kept = sorted({round(position) for position in positions.tolist()}) if len(descending) else []
    return [(position, float(f"{descending[position - 1]:.4g}")) for position in kept]


def check_no_embeddings(method: str, layers: Mapping[str, ProtectedLayer]) -> None:
    """Raise if an embedding is protected, for methods that need bases that are vectors."""
    for name, layer in layers.items():
        if layer.layer_type.is_lookup:
            raise TypeError(f"{name!r} is an embedding, whose bases are tokens, and {method} has no form for those")


def get_matrices(layer: ProtectedLayer, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return a layer's tensors as matrices [groups, out, inputs], and [groups, out] for its bias if it has one.

    Args:
        layer: Protected layer.
        tensors: Values or gradients by parameter name; the bias's may be missing.
    """
    bias = None if layer.bias is None else tensors.get(layer.bias.name)
    return layer.block.view_matrix(tensors[layer.weight.name]), None if bias is None else layer.block.view_bias(bias)


def embed_matrices(
    layer: ProtectedLayer, matrix: Tensor, bias: Tensor | None, like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return tensors like a layer's parameters with the given values in the layer's block, by parameter name."""
    found = {layer.weight.name: layer.block.embed_matrix(matrix, like[layer.weight.name])}
    if layer.bias is not None and bias is not None:
        found[layer.bias.name] = layer.block.embed_bias(bias, like[layer.bias.name])
    return found


def _schedule_threshold(step: float, start: float) -> Callable[[int], float]:
    """Return the threshold as a function of the task, counted from 0."""
    return lambda task: min(1.0, start + step * task)
