"""``GradientMemory``: the user's interface to the subspaces of a model."""

from __future__ import annotations

import copy
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sgp import storage
from sgp.patterns import check_patterns
from sgp.projection.anchor import Anchor, copy_tensors, has_grown
from sgp.projection.caller_warning import warn_caller
from sgp.projection.capacity import Capacity, Summary, find_owners, measure_capacity
from sgp.projection.check import Check, measure_changes
from sgp.projection.distributed import ProcessGroup
from sgp.projection.gram import InputGram
from sgp.projection.hook import OptimizerHook, check_mode, warn_of_masters
from sgp.projection.layer import ProtectedLayer, ProtectedParameter
from sgp.projection.modes import MODES, Mode
from sgp.projection.plan import Plan, plan_update
from sgp.projection.precision import full_precision
from sgp.projection.protected_model import ProtectedModel
from sgp.projection.saved_state import FUNCTION, check_state
from sgp.projection.scan import UNKNOWN_TYPE, BiasRule, RestRule, Scan, ScanRules
from sgp.projection.sharded import distribute_like, gather_whole
from sgp.projection.subspace import STORES, Bases, Choice, Numerics, Store
from sgp.projection.tokens import load_bases
from sgp.projection.update import (
    DEFAULT_BUDGET,
    GRAM_CHOICES,
    GramChoice,
    Threshold,
    UpdatePlan,
    check_not_single_batch,
    check_passes,
    check_threshold,
    choose_path,
    collect_subspaces,
    find_limits,
    find_threshold,
    group_passes,
    rescan,
    resize_subspaces,
    scan_layers,
)
from sgp.projection.update_report import LayerUpdate, UpdateReport

Preset = Literal["paper", "reference"]

PRESETS: dict[str, tuple[Numerics, BiasRule]] = {
    "paper": (Numerics(), "protect"),
    "reference": (Numerics(first_rank="one-less", truncation="after", orthogonalise=False), "freeze"),
}
# Mean importance above which a layer can hardly learn any more.
NEARLY_FULL = 0.95
# One direction dominates a layer if it has more than this share of the energy, and at most this share of all possible
# bases reaches the threshold.
DOMINATED, FEW = 0.9, 1 / 64


class GradientMemory:
    """Learn the next task without losing the last one: scaled gradient projection (Saha & Roy, AAAI 2023).

    After each task :meth:`update` finds the directions that the inputs of each layer span, and the importance of each
    direction. Attached to an optimizer, the memory scales every later step along these directions by one minus the
    importance::

        memory = sgp.GradientMemory(model, threshold=0.97, alpha=10, exclude=["heads.*"])
        memory.attach(optimizer)
        for task in tasks:
            train(model, optimizer, task)
            memory.update(task.loader)

    The model is not wrapped or changed in any way, and no data are stored.

    Args:
        model: Any module. Linear layers (GPT-2's ``Conv1D`` too), convolutions, embeddings, recurrent layers,
            ``nn.MultiheadAttention`` and every type given to :func:`sgp.register_layer` are protected.
        threshold: epsilon_th, the share of each layer's input energy that the bases must capture, in (0, 1]; or a
            function of the task's index (from 0) that returns it; or a dict of either by pattern on layer names, of
            which the first matching one applies. The number of samples of an update matters as much as the threshold,
            so there is no default.
        alpha: Scale coefficient of Eq. 2, at least 0. A larger value protects more; ``math.inf`` is GPM exactly.
        exclude: Patterns (as in ``fnmatch``) on qualified names of modules and parameters that stay free, such as the
            heads of single tasks.
        bias: ``"protect"`` treats a bias as the weight of an additional input that is always 1, ``"freeze"`` freezes it
            after the first task. None takes the value of the preset.
        rest: ``"freeze"`` or ``"free"``: what happens to all other parameters (norm layers, unknown layer types) and to
            norm statistics after the first task.
        strict: Whether an unknown layer type is an error instead of a warning.
        preset: ``"paper"`` follows the text of the paper, ``"reference"`` the published code where it differs.
        numerics: Numerical choices that replace those of the preset.
        anchor: Whether to keep a copy of the model's weights at each update as the reference of :meth:`check`.
        store: Type in which bases are stored. ``"bfloat16"`` takes half the bytes of ``"float32"`` and ``"int8"`` a
            quarter; steps compute with the rounded bases, so a little of each step leaks (docs/limits.md has figures).
        gram: Cheapest way in which an update may collect the inputs of a layer. ``"float64"`` is exact; ``"float32"``
            keeps half of a float32 Gram matrix; ``"sketch"`` a low-rank sketch where few directions suffice, whose
            certificate guarantees that the bases capture the threshold. ``"auto"`` takes float64 up to 512 dimensions,
            float32 above, and a sketch from 2048 on. Grouped layers, embeddings, float64 weights, thresholds above
            0.999, and methods that need whole spectra are always collected in float64.

    Raises:
        TypeError: An argument has the wrong type, or a layer cannot be protected as it is configured.
        ValueError: An argument has an invalid value, or the model has no layer to protect.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        threshold: Threshold | Mapping[str, Threshold],
        alpha: float = 10.0,
        exclude: Sequence[str] = (),
        bias: BiasRule | None = None,
        rest: RestRule = "freeze",
        strict: bool = False,
        preset: Preset = "paper",
        numerics: Numerics | None = None,
        anchor: bool = True,
        store: Store = "float32",
        gram: GramChoice = "auto",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        if isinstance(exclude, str):
            raise TypeError(f"exclude must be a list of patterns: [{exclude!r}]")
        if not isinstance(alpha, int | float) or math.isnan(alpha) or alpha < 0:
            raise ValueError(f"alpha must be a number of at least 0, or math.inf for GPM; got {alpha!r}")
        _check_choice("preset", preset, PRESETS)
        _check_choice("bias", bias, (None, "protect", "freeze"))
        _check_choice("rest", rest, ("freeze", "free"))
        _check_choice("store", store, STORES)
        _check_choice("gram", gram, GRAM_CHOICES)
        for value in threshold.values() if isinstance(threshold, Mapping) else [threshold]:
            if not callable(value):
                check_threshold(value, "threshold")
        model = _unwrap_model(model)
        self.threshold = threshold
        self.alpha = float(alpha)
        self.rules = ScanRules(tuple(exclude), bias or PRESETS[preset][1], rest, strict)
        self.store: Store = store
        self.gram: GramChoice = gram
        self.numerics = numerics or PRESETS[preset][0]
        self._keeps_anchor = anchor
        self._anchor: Anchor | None = None
        self._hooks: list[weakref.ref[OptimizerHook]] = []
        check_patterns(model, exclude, "exclude")
        scan = scan_layers(model, self.rules)
        if isinstance(threshold, Mapping):
            check_patterns(model, threshold, "threshold", scan.layers)
        for layer in scan.layers.values():  # raises now and not after the first task has been trained
            find_threshold(threshold, layer, 0)
        self._protected = ProtectedModel(model, scan)
        _warn_of_unknown_types(model, scan)

    @classmethod
    def from_file(cls, model: nn.Module, path: str | os.PathLike[str], **overrides: Any) -> Self:
        """Return a memory with the settings and the contents of a file that :meth:`save` wrote.

        Args:
            model: Model that the memory was saved for.
            path: Path of the file.
            overrides: Settings that replace those of the file. A threshold that is a function cannot be saved, so it
                must be passed.

        Returns:
            The memory.

        Raises:
            ValueError: The file is damaged or does not fit the model, or a threshold must be passed.
        """
        state = storage.read(path)
        check_state(state)
        settings = dict(state["settings"])
        if "threshold" not in overrides and FUNCTION in _list_thresholds(settings["threshold"]):
            raise ValueError(f"the memory at {os.fspath(path)!r} has a function as its threshold: pass threshold=")
        numerics = Numerics(**settings.pop("numerics"))
        memory = cls(model, **({"numerics": numerics} | settings | overrides))
        memory.load_state_dict({**state, "settings": memory._describe_settings()})
        return memory

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self._describe_settings().items())
        return f"GradientMemory(layers={len(self._protected.layers)}, tasks={self.tasks}, {settings})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle or a copy of the memory, which is attached to no optimizer."""
        state = {name: value for name, value in vars(self).items() if name not in ("_protected", "_hooks")}
        return {"attributes": state, "model": self.model, "memory": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state["attributes"])
        self._hooks = []
        self._protected = ProtectedModel(state["model"], scan_layers(state["model"], self.rules))
        anchor = self._anchor
        self.load_state_dict(state["memory"])
        self._anchor = anchor

    @property
    def model(self) -> nn.Module:
        """The protected model."""
        return self._protected.model

    @property
    def tasks(self) -> int:
        """Number of tasks in the memory."""
        return self._protected.tasks

    @property
    def exclude(self) -> tuple[str, ...]:
        """Patterns on names of modules and parameters that stay free."""
        return self.rules.exclude

    @property
    def layers(self) -> dict[str, ProtectedLayer]:
        """Protected layers by name."""
        return dict(self._protected.layers)

    @property
    def subspaces(self) -> dict[str, Bases]:
        """Bases and importances by layer."""
        return self._protected.subspaces

    @property
    def anchor(self) -> Anchor:
        """The weights as of the last update. A pending change of ``every`` steps is projected first."""
        self._protected.check_not_temporary("the compared weights would be restored at its end")
        self._protected.flush()
        return self._get_anchor()

    def attach(self, optimizer: Optimizer, *, mode: Mode = "auto", every: int = 1) -> OptimizerHook:
        """Project every later step of an optimizer.

        Any ``torch.optim.Optimizer`` is accepted; it is not wrapped. Attaching again, or attaching a new optimizer for
        each task, is supported, and costs nothing before the first update.

        Args:
            optimizer: Optimizer of parameters of the model; groups may be added later. If a trainer has wrapped it
                (Accelerate, Lightning), the inner optimizer is used. With ``fully_shard``, create and attach it after
                the model is sharded.
            mode: ``"auto"`` chooses the cheapest mode that is exact for this optimizer and this step; ``"step"`` always
                projects the change that was applied; ``"gradient"`` projects the gradient, exact or not; ``"input"``
                tries to project the inputs of every linear layer, even if that saves nothing, and refuses optimizers
                for which it is not exact. With gradient clipping the modes differ: in ``"step"`` and ``"gradient"`` the
                gradient is clipped before it is projected, in ``"input"`` (which ``"auto"`` may choose for plain SGD)
                after.
            every: Number of steps whose change is projected at once. The cost is divided by this number, and the
                guarantees hold at every such step; in between, ``hook.flush()`` projects immediately, and ``with
                hook.projected():`` evaluates the projected weights. An update and every state dict flush first; an
                average of weights between two projections is not projected. 1 is the paper's algorithm.

        Returns:
            A hook that shows the modes of the layers and can be detached.

        Raises:
            TypeError: The optimizer is not a ``torch.optim.Optimizer``.
            ValueError: The optimizer has no parameters of the model, or the mode or ``every`` is invalid.
        """
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"attach takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
        optimizer = _unwrap_optimizer(optimizer)
        _check_choice("mode", mode, MODES)
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of at least 1, got {every!r}")
        if every > 1 and mode not in ("auto", "step"):
            raise ValueError(f"mode={mode!r} acts on every single step; every={every} needs mode='auto' or 'step'")
        protected = self._protected
        protected.find_shards()
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        own = [p for p in self.model.parameters() if id(p) in stepped]
        if not own:
            raise ValueError(
                "the optimizer holds none of the model's parameters: it was built for another model, or before the "
                "parameters of this one were replaced (fully_shard replaces them: build the optimizer after it)"
            )
        if resize_subspaces(protected.layers.values()):
            protected.version += 1
        check_mode(optimizer, mode)
        warn_of_masters(own)
        for hook in self._get_hooks():
            if hook.is_of(optimizer):
                hook.detach()
        hook = OptimizerHook(protected, optimizer, mode, every)
        self._hooks.append(weakref.ref(hook))
        return hook

    def update(
        self,
        batches: Iterable[Any],
        *,
        samples: int | Mapping[str, int] | None = None,
        forward: Callable[[Any], Any] | None = None,
        mask: Callable[[Any], Tensor | None] | None = None,
        budget: int = DEFAULT_BUDGET,
        allow_unattached: bool = False,
        distributed: bool = True,
    ) -> UpdateReport:
        """Add the task that was just learned: bases and importances from the inputs of the layers.

        The model runs in eval mode without gradients; its flags, norm statistics and the random state do not change.
        All layers are computed before any is stored, so an update that fails changes nothing.

        If torch.distributed has been set up, every process calls this with its own shard of the data, and all end with
        the same memory, to the bit. A failure in one process is raised in all. If the model is sharded
        (``fully_shard``), a process with fewer batches runs its last one again, without counting it, while the others
        continue.

        Args:
            batches: DataLoader or any iterable of batches: a tensor, a tuple whose first item is the input, or a dict
                that is passed as keywords. Tensors on the CPU are moved to the model's device.
            samples: Number of inputs to use, of shuffled data; or a dict of numbers by pattern on layer names. None
                uses all, in constant memory. Over several processes it is the total number.
            forward: Function that runs one batch through the model, for batches of any other kind.
            mask: Function that returns which positions of a batch's sequences count, [samples, positions], or None if
                all do. Without it, the ``attention_mask`` of a batch is used if it has one. It does not apply to inputs
                with other first two dimensions.
            budget: Bytes for the Gram matrices of one pass over the data. Layers that do not fit together take more
                passes; layers that share bases count once and stay together.
            allow_unattached: Whether to continue although weights were changed by an optimizer that is not attached.
            distributed: Whether other processes take part.

        Returns:
            A report of the bases of each layer, the energy that they capture, and the cost. ``print`` shows a table.

        Raises:
            ValueError: The model is sharded and ``distributed`` is False; or an argument or a batch is invalid.
        """
        processes = ProcessGroup(distributed)
        protected = self._protected
        processes.run_together(protected.find_shards)
        if protected.is_sharded and not distributed:
            raise ValueError("the model is sharded, so no process can run it alone: leave out distributed=False")
        protected.flush()
        plan = processes.run_together(partial(self._plan_update, batches, samples, budget))
        if not allow_unattached:
            processes.run_together(self._check_attached)
        start = time.perf_counter()
        with full_precision(protected.device):
            subspaces, updates = collect_subspaces(
                plan, processes, protected, batches, forward=forward, mask=mask, grow=self._grow_and_compress
            )
        seconds = time.perf_counter() - start
        _warn_of_unreached([name for name in plan.scan.layers if name not in subspaces])
        _warn_of_full(subspaces)
        _warn_of_dominated(updates)
        tensors = copy_tensors(self.model) if self._keeps_anchor else None
        for name, subspace in subspaces.items():
            plan.scan.layers[name].subspace = subspace
        protected.replace(protected.tasks + 1, plan.scan)
        protected.fingerprint()
        self._anchor = None if tensors is None else Anchor(tensors, self._find_protected_names())
        for hook in self._get_hooks():
            hook.refresh(has_grown=True)
        return UpdateReport(updates, seconds)

    def grow_bases(self, bases: Bases, gram: InputGram, threshold: float, choose: Choice | None = None) -> Bases:
        """Return the bases of a layer after a task. Subclasses that choose bases by another rule override this.

        Args:
            bases: Bases before the task; empty for the first task.
            gram: Gram matrix of the layer's inputs.
            threshold: Threshold of the layer.
            choose: Function that returns the number of directions to add, instead of the smallest number that reaches
                the threshold.

        Returns:
            The new bases.
        """
        return bases.grow(gram, threshold=threshold, alpha=self.alpha, numerics=self.numerics, choose=choose)

    def _grow_and_compress(self, bases: Bases, gram: InputGram, threshold: float) -> Bases:
        return self.grow_bases(bases, gram, threshold).compress(self.store)

    def plan(
        self,
        samples: int | Mapping[str, int],
        batch: Any = None,
        *,
        forward: Callable[[Any], Any] | None = None,
        mask: Callable[[Any], Tensor | None] | None = None,
        budget: int = DEFAULT_BUDGET,
    ) -> Plan:
        """Estimate the bytes and seconds of an update.

        Args:
            samples: As in :meth:`update`; each layer must have a number.
            batch: Batch as in :meth:`update`. It shows how many rows a sample has in each layer (positions of a
                sequence, patches of an image), which layers share bases, and how long a forward pass takes. Without it
                one row per sample is counted, and forward passes are not.
            forward: As in :meth:`update`.
            mask: As in :meth:`update`.
            budget: As in :meth:`update`.

        Returns:
            The estimate; ``print`` shows it as a table.

        Raises:
            ValueError: A layer has no number of samples.
        """
        plan = self._plan_passes(samples, budget, can_repeat=True)
        limits = {name: limit for name, limit in plan.limits.items() if limit is not None}
        for name in plan.limits:
            if name not in limits:
                raise ValueError(f"samples: no pattern matches the layer {name!r}; add one, such as '*'")
        return plan_update(self.model, plan, limits, batch=batch, forward=forward, mask=mask)

    @torch.no_grad()
    def project(self, change: Tensor, layer: str, bias: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Project a change of a layer's weight, for weights that are edited without an optimizer.

        The change is projected as a step is, for every input of the weight: if the weight is tied between embedding and
        output layer, from both sides; ``in_proj_weight`` of ``nn.MultiheadAttention`` for query, key and value.

        Args:
            change: Change of the layer's whole weight: a tensor, or a DTensor, for which every process calls this.
            layer: Name of the layer in :meth:`summary`, or name of the module.
            bias: Change of the layer's whole bias, if it is protected with the weight.

        Returns:
            The projected change, in the layout of ``change``; with ``bias``, the projected changes of weight and bias.
        """
        members = self._find_layers_of_weight(layer)
        protected_bias = next((member.bias for member in members if member.bias is not None), None)
        _check_change(layer, change, members[0].weight, bias, protected_bias)
        device = members[0].weight.tensor.device
        whole = gather_whole(change).to(device, copy=True)
        whole_bias = None if bias is None else gather_whole(bias).to(device, copy=True)
        with full_precision(device):
            for member in members:
                if member.subspace is not None:
                    member.project_whole_(whole, None if member.bias is None else whole_bias)
        result = distribute_like(whole.to(change.device), change)
        if bias is None or whole_bias is None:
            return result
        return result, distribute_like(whole_bias.to(bias.device), bias)

    @contextmanager
    def edit_weights(self, *, exclude: Sequence[str] = ()) -> Iterator[None]:
        """Allow edits of protected weights inside the context, for example by changes from :meth:`project`.

        When the context ends, the weights are recorded as those of the last update: :meth:`check` compares with them,
        and the next update accepts them.

        Args:
            exclude: Additional patterns on names of modules and parameters, which are free from now on. The bases of
                their layers are dropped.

        Raises:
            RuntimeError: A protected weight was trained by an optimizer that is not attached.
        """
        protected = self._protected
        protected.check_not_temporary("an edit would be undone at its end")
        protected.flush()
        self._check_attached()
        check_patterns(self.model, exclude, "exclude")
        added = [pattern for pattern in exclude if pattern not in self.exclude]
        if added:
            rules = replace(self.rules, exclude=(*self.exclude, *added))
            protected.replace(self.tasks, rescan(protected, rules))
            self.rules = rules
        yield
        if self.tasks == 0:
            return
        protected.fingerprint()
        if self._keeps_anchor:
            self._anchor = Anchor(copy_tensors(self.model), self._find_protected_names())
        for hook in self._get_hooks():
            hook.refresh(has_grown=False)

    def set_importances(self, importances: Mapping[str, Tensor]) -> None:
        """Replace the importances of bases, for methods that learn them.

        The modes ``step`` and ``gradient`` use them from the next step on; the input mode uses those of the last
        update.

        Args:
            importances: Importances in [0, 1] of all bases of a layer, [groups, k], by the layer's name.

        Raises:
            ValueError: The shape of some importances is not that of their layer's.
        """
        for name, importance in importances.items():
            layer = self._protected.layers[name]
            assert layer.subspace is not None
            if importance.shape != layer.subspace.importance.shape:
                raise ValueError(
                    f"layer {name!r} needs importances of shape {tuple(layer.subspace.importance.shape)}, got "
                    f"{tuple(importance.shape)}"
                )
            layer.subspace = layer.subspace.with_importance(importance.detach().clone())

    def capacity(self) -> Capacity:
        """Return which parameters are protected and how much free capacity is left, as data."""
        return measure_capacity(self._protected)

    def summary(self) -> Summary:
        """Return a printable table of the protected layers, and of all other parameters with the reasons."""
        return Summary(self.capacity(), self.tasks)

    def check(
        self,
        batch: Any,
        *,
        forward: Callable[[Any], Any] | None = None,
        mask: Callable[[Any], Tensor | None] | None = None,
        reference: Mapping[str, Tensor] | None = None,
    ) -> Check:
        """Measure how training since the last update has changed the outputs of the model for a batch.

        If the model is sharded, every process calls this, each with its own batch.

        Args:
            batch: Batch as in :meth:`update`.
            forward: As in :meth:`update`.
            mask: As in :meth:`update`. The outputs of the model are compared at all positions.
            reference: A ``state_dict`` of the model to compare with, instead of the weights as of the last update.

        Returns:
            Leak and drift of the model and of each layer; ``print`` shows them as a table.

        Raises:
            RuntimeError: There was no update, or the weights as of the last update are not available.
        """
        if self.tasks == 0:
            raise RuntimeError("there is nothing to check before the first update")
        reference = reference or self._get_anchor()
        self._protected.find_shards()
        with full_precision(self._protected.device):
            return measure_changes(self._protected, batch, reference, forward, mask)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the memory as tensors and plain values."""
        protected = self._protected
        shared: dict[int, dict[str, Any]] = {}
        for name, subspace in protected.subspaces.items():
            entry = shared.setdefault(id(subspace), {"layers": []} | subspace.state_dict())
            entry["layers"].append(name)
        parameters, layers = protected.scan.parameters.values(), protected.layers.values()
        return {
            "format": storage.FORMAT,
            "settings": self._describe_settings(),
            "tasks": protected.tasks,
            "subspaces": list(shared.values()),
            "statistics": protected.norm_statistics.state_dict(),
            "fingerprints": {p.name: p.fingerprint for p in parameters if p.fingerprint is not None},
            "trained": sorted(p.name for p in parameters if p.is_stepped),
            "proved": {layer.name: layer.is_input_proven for layer in layers if layer.is_input_proven is not None},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict`.

        If the state has other settings than this memory or does not fit the model, a ``ValueError`` names the
        difference, and the memory is unchanged.
        """
        protected = self._protected
        protected.check_not_temporary("load_state_dict() would project the pending change with other bases")
        check_state(state)
        self._check_settings(state["settings"])
        protected.find_shards()
        scan = self._scan_for(state["subspaces"])
        missing = [layer.name for layer in scan.layers.values() if layer.subspace is None]
        if missing and len(missing) < len(scan.layers):
            warn_caller(f"the saved memory has no bases for {', '.join(missing)}")
        protected.norm_statistics.load_state_dict(copy.deepcopy(state["statistics"]), self.model)
        protected.flush()  # with the old bases, with which the steps were taken
        protected.replace(int(state["tasks"]), scan)
        for name, parameter in scan.parameters.items():
            parameter.fingerprint = state["fingerprints"].get(name)
            parameter.is_stepped = name in state["trained"]
        for name, layer in scan.layers.items():
            layer.is_input_proven = state["proved"].get(name)
        is_same = self.tasks > 0 and not any(parameter.has_changed() for parameter in scan.parameters.values())
        has_anchor = self._keeps_anchor and is_same
        self._anchor = Anchor(copy_tensors(self.model), self._find_protected_names()) if has_anchor else None
        for hook in self._get_hooks():
            hook.refresh(has_grown=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the memory to a safetensors file. A write that fails leaves an existing file unchanged."""
        storage.write(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load a file that :meth:`save` wrote. Nothing in it is executed, and a damaged file changes nothing."""
        self.load_state_dict(storage.read(path))

    def _get_hooks(self) -> list[OptimizerHook]:
        """Return the attached hooks, oldest first, and drop the others."""
        hooks = [hook for hook in (reference() for reference in self._hooks) if hook is not None and hook.is_attached]
        self._hooks = [weakref.ref(hook) for hook in hooks]
        return hooks

    def _plan_update(self, batches: Iterable[Any], samples: int | Mapping[str, int] | None, budget: int) -> UpdatePlan:
        """Return the plan of an update. All invalid arguments raise here, before any data are read."""
        check_not_single_batch(batches)
        protected = self._protected
        protected.check_not_temporary("an update would see weights that are restored at its end")
        protected.norm_statistics.restore()
        check_patterns(self.model, self.exclude, "exclude")
        plan = self._plan_passes(samples, budget, can_repeat=not isinstance(batches, Iterator))
        check_passes(plan.passes, batches, budget)
        return plan

    def _plan_passes(self, samples: int | Mapping[str, int] | None, budget: int, *, can_repeat: bool) -> UpdatePlan:
        scan = rescan(self._protected, self.rules)
        layers = scan.layers
        thresholds = {name: find_threshold(self.threshold, layer, self.tasks) for name, layer in layers.items()}
        limits = find_limits(self.model, samples, layers)
        paths = {n: choose_path(self._gram, layers[n], thresholds[n], can_repeat=can_repeat) for n in layers}
        return UpdatePlan(scan, thresholds, limits, paths, group_passes(layers.values(), budget, paths))

    @property
    def _gram(self) -> GramChoice:
        """The setting ``gram``, or float64 if bases grow by another rule, which may need whole spectra."""
        needs_spectra = type(self).grow_bases is not GradientMemory.grow_bases or not self.numerics.orthogonalise
        return "float64" if needs_spectra else self.gram

    def _check_attached(self) -> None:
        # After training without projection, an update could not guarantee that older tasks were protected.
        for parameter in self._protected.scan.parameters.values():
            if not parameter.is_stepped and parameter.has_changed() and not self._has_only_grown(parameter):
                raise RuntimeError(
                    f"layer {parameter.name.rpartition('.')[0] or '(model)'!r} was trained by an optimizer that is not "
                    f"attached, so older tasks were not protected ({parameter.name} has changed): call "
                    "memory.attach(optimizer) before training, or update(..., allow_unattached=True)"
                )

    def _has_only_grown(self, parameter: ProtectedParameter) -> bool:
        """Return whether a parameter has gained rows since the last update, and has not changed otherwise."""
        now = parameter.tensor
        then = None if self._anchor is None else self._anchor.get(parameter.name)
        if then is None or not has_grown(then, now):
            return False
        return torch.equal(gather_whole(then).to(now.device), gather_whole(now)[: len(then)])

    def _find_protected_names(self) -> frozenset[str]:
        """Return the names of all protected parameters and of the frozen parameters that are trained."""
        scan = self._protected.scan
        protected = {parameter.name for layer in scan.layers.values() for parameter in layer.parameters}
        return frozenset(protected | {name for name in scan.frozen if scan.parameters[name].tensor.requires_grad})

    def _find_layers_of_weight(self, layer: str) -> list[ProtectedLayer]:
        """Return all layers that share a weight, given the name of one of its layers or modules.

        Raises:
            ValueError: The name has no protected weight, or several.
        """
        layers = self._protected.layers
        named = [layers[layer]] if layer in layers else []
        if not named:
            owners = find_owners(self._protected)
            named = [each for each in layers.values() if layer in owners[each.weight.name]]
        if not named:
            near = get_close_matches(layer, layers, n=3, cutoff=0.0)
            raise ValueError(f"no layer {layer!r} is protected; the nearest names are {', '.join(near)}")
        if any(each.weight is not named[0].weight for each in named):
            names = ", ".join(each.name for each in named)
            raise ValueError(f"{layer!r} has several weights: pass the name of one of {names}")
        members = [each for each in layers.values() if each.weight is named[0].weight]
        if len({each.bias for each in members if each.bias is not None}) > 1:
            names = ", ".join(each.name for each in members)
            raise ValueError(f"layer {layer!r}: {names} share one weight but no bias, so only a step can be projected")
        return members

    def _get_anchor(self) -> Anchor:
        if self._anchor is None:
            raise RuntimeError(
                "the weights as of the last update are not available (anchor=False, there was no update, or the memory "
                "was loaded into a model with other weights): pass reference=, a state_dict of the model"
            )
        return self._anchor

    def _describe_settings(self) -> dict[str, Any]:
        """Return the settings that determine the results of the memory, as plain values."""
        threshold = self.threshold
        return {
            "threshold": {pattern: _describe_threshold(value) for pattern, value in threshold.items()}
            if isinstance(threshold, Mapping)
            else _describe_threshold(threshold),
            "alpha": self.alpha,
            "exclude": list(self.exclude),
            "bias": self.rules.bias,
            "rest": self.rules.rest,
            "numerics": asdict(self.numerics),
            "store": self.store,
            "gram": self.gram,
        }

    def _check_settings(self, saved: Mapping[str, Any]) -> None:
        own = self._describe_settings()
        differing = [f"{n}={saved[n]!r} (here {own[n]!r})" for n in own if n in saved and saved[n] != own[n]]
        if differing:
            raise ValueError(
                f"the saved memory has other settings: {', '.join(differing)}: create the memory with these, or with "
                "GradientMemory.from_file, whose keywords replace settings of the file"
            )

    def _scan_for(self, saved: Sequence[Mapping[str, Any]]) -> Scan:
        """Scan the model, and return the scan with the saved subspaces in its layers.

        Raises:
            ValueError: The subspaces do not fit the model.
        """
        found: dict[str, Bases] = {}
        for entry in saved:
            tensors = {name: value.clone() for name, value in entry.items() if isinstance(value, Tensor)}
            found |= dict.fromkeys(entry["layers"], load_bases(tensors))
        dimensions = {name: subspace.dimension for name, subspace in found.items()}
        scan = scan_layers(self.model, self.rules, dimensions)
        for name, subspace in found.items():
            layer = scan.layers.get(name)
            if layer is None:
                known = ", ".join(scan.layers)
                raise ValueError(f"layer {name!r} of the saved memory is not in the model, which has {known}")
            _check_fit(layer, subspace.resize(layer.dimension))
            layer.subspace = subspace
        resize_subspaces(scan.layers.values())
        return scan


def _unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers of torch.compile and DistributedDataParallel."""
    inside = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return _unwrap_model(inside) if isinstance(inside, nn.Module) else model


def _unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside a wrapper that was not initialized as an optimizer and only forwards steps.

    A wrapper that was initialized (such as Lookahead) may change weights in its own step, and runs hooks around it.
    """
    inside = getattr(optimizer, "optimizer", None)
    has_hooks = "_optimizer_step_pre_hooks" in vars(optimizer)
    return _unwrap_optimizer(inside) if isinstance(inside, Optimizer) and not has_hooks else optimizer


def _check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def _describe_threshold(threshold: Threshold) -> float | str:
    return FUNCTION if callable(threshold) else float(threshold)


def _list_thresholds(threshold: Any) -> list[Any]:
    return list(threshold.values()) if isinstance(threshold, Mapping) else [threshold]


def _check_change(
    layer: str, change: Tensor, weight: ProtectedParameter, bias: Tensor | None, own_bias: ProtectedParameter | None
) -> None:
    if bias is None and own_bias is not None:
        raise ValueError(
            f"layer {layer!r}: its bias {own_bias.name} is protected with the weight: pass bias=, zeros if it does not "
            "change"
        )
    if bias is not None and own_bias is None:
        raise ValueError(f"layer {layer!r}: its bias is not protected with the weight: leave out bias=")
    for name, given, own in (("change", change, weight), ("bias", bias, own_bias)):
        if given is not None and own is not None and given.shape != own.tensor.shape:
            raise ValueError(f"{name} has shape {tuple(given.shape)}, layer {layer!r} has {tuple(own.tensor.shape)}")


def _check_fit(layer: ProtectedLayer, subspace: Bases) -> None:
    found = (subspace.groups, subspace.dimension)
    if not subspace.is_consistent:
        raise ValueError(f"layer {layer.name!r} of the saved memory is damaged: bases and importances differ in number")
    if found != (layer.groups, layer.dimension):
        hint = "" if layer.bias is None and found[1] != layer.dimension + 1 else " (a protected bias adds one)"
        raise ValueError(
            f"layer {layer.name!r}: the saved memory has {found[0]} x {found[1]} input dimensions, the model "
            f"{layer.groups} x {layer.dimension}{hint}"
        )


def _warn_of_unknown_types(model: nn.Module, scan: Scan) -> None:
    """Warn once if parameters will be frozen because the type of their module is unknown."""
    names = [name for name, reason in scan.frozen.items() if reason.startswith(UNKNOWN_TYPE)]
    if not names:
        return
    types = sorted({scan.frozen[name].removeprefix(UNKNOWN_TYPE).split(",")[0].strip() for name in names})
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    share = sum(sizes[name] for name in names) / max(1, sum(sizes.values()))
    warn_caller(
        f"{', '.join(types)}: unknown layer type{'s' * (len(types) > 1)}, with {share:.1%} of all parameters, which "
        "will be frozen after the first task: register the type with sgp.register_layer, exclude it, or set rest='free'"
    )


def _warn_of_unreached(names: Sequence[str]) -> None:
    if names:
        warn_caller(
            f"no input reached {', '.join(names)} in this update, or the mask excluded all of it, so this task is not "
            "protected there: exclude layers that are not meant to be protected"
        )


def _warn_of_dominated(updates: Sequence[LayerUpdate]) -> None:
    """Warn once about all layers whose few bases are due to a single direction with nearly all of the energy."""
    dominated = [update for update in updates if update.leading > DOMINATED and update.bases <= FEW * update.dimension]
    if dominated:
        listed = ", ".join(f"{' and '.join(update.layers)} ({update.leading:.1%})" for update in dominated)
        warn_caller(
            f"one direction has nearly all of the input energy of {listed}, so very few bases reach the threshold: a "
            "higher threshold for these layers protects more of their inputs"
        )


def _warn_of_full(subspaces: Mapping[str, Bases]) -> None:
    """Warn once about all layers that have hardly any free capacity left."""
    full = {name: 1 - space.free for name, space in subspaces.items() if 1 - space.free > NEARLY_FULL}
    if full:
        listed = ", ".join(f"{name!r} ({share:.1%})" for name, share in full.items())
        warn_caller(
            f"nearly all of the capacity is blocked in {listed}, which can hardly learn any more: lower the threshold "
            "or alpha, use fewer samples, or widen the layer"
        )
