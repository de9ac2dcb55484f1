"""GradientMemory: the subspaces of a whole model, and everything that a user does with them."""

from __future__ import annotations

import copy
import math
import os
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
from sgp.projection.scan import UNKNOWN_TYPE, BiasRule, RestRule, Scan, ScanRules
from sgp.projection.sharded import as_dtensor, gather_whole, get_local, has_same_layout
from sgp.projection.subspace import STORES, Bases, Choice, Numerics, Store
from sgp.projection.tokens import load_bases
from sgp.projection.update import (
    DEFAULT_BUDGET,
    Threshold,
    UpdatePlan,
    check_not_single_batch,
    check_passes,
    check_threshold,
    collect_subspaces,
    find_limits,
    find_threshold,
    group_passes,
    rescan,
    resize_subspaces,
    scan_layers,
)

Preset = Literal["paper", "reference"]

PRESETS: dict[str, tuple[Numerics, BiasRule]] = {
    "paper": (Numerics(), "protect"),
    "reference": (Numerics(first_rank="one-less", truncation="after", orthogonalise=False), "freeze"),
}
# A layer whose mean importance exceeds this can hardly learn any more.
NEARLY_FULL = 0.95
# What a state dict of a memory holds.
STATE = ("settings", "tasks", "subspaces", "statistics", "fingerprints", "trained", "proved")
# Stands in a file for a threshold that is a function, which a file cannot hold.
FUNCTION = "function"


class GradientMemory:
    """Learn the next task without losing the last one: scaled gradient projection (Saha & Roy, AAAI 2023).

    After each task :meth:`update` finds the directions that the inputs of each layer span, and how important each
    direction is. Attached to an optimizer, the memory scales every later step along them by one minus that
    importance::

        memory = sgp.GradientMemory(model, threshold=0.97, alpha=10, exclude=["heads.*"])
        memory.attach(optimizer)
        for task in tasks:
            train(model, optimizer, task)
            memory.update(task.loader)

    The model is not wrapped or changed in any way, and no data are kept.

    Args:
        model: Any module. Linear layers (GPT-2's ``Conv1D`` too), convolutions, embeddings, recurrent layers,
            ``nn.MultiheadAttention`` and every type given to :func:`sgp.register_layer` are protected.
        threshold: epsilon_th, the share of each layer's input energy that the bases must capture, in (0, 1]; or a
            function of the task's index (from 0) that returns it; or a dict of either by pattern on layer names, of
            which the first that matches counts. The number of samples of an update matters as much as this, so there
            is no default.
        alpha: Scale coefficient of Eq. 2, at least 0. Larger protects more; ``math.inf`` is GPM exactly.
        exclude: Patterns (as in ``fnmatch``) on qualified module and parameter names that are left free, such as the
            heads of single tasks.
        bias: ``"protect"`` treats a bias as the weight of one more input that is always 1, ``"freeze"`` keeps it after
            the first task. None is the preset's.
        rest: What happens to all other parameters (norm layers, unknown layer types) and to norm statistics after the
            first task: ``"freeze"`` or ``"free"``.
        strict: Whether an unknown layer type is an error instead of a warning.
        preset: ``"paper"`` follows the text, ``"reference"`` the published code where it differs.
        numerics: Single choices of the preset, if wanted otherwise.
        anchor: Whether to keep a copy of the model's weights at each update, for :meth:`check` to compare with.
        store: Type in which bases are stored. ``"bfloat16"`` takes half the bytes of ``"float32"`` and ``"int8"`` a
            quarter; steps compute with the rounded bases, so a little of each step leaks (docs/limits.md has figures).
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
        for value in threshold.values() if isinstance(threshold, Mapping) else [threshold]:
            if not callable(value):
                check_threshold(value, "threshold")
        model = _unwrap_model(model)
        self.threshold = threshold
        self.alpha = float(alpha)
        self.rules = ScanRules(tuple(exclude), bias or PRESETS[preset][1], rest, strict)
        self.store: Store = store
        self.numerics = numerics or PRESETS[preset][0]
        self._keeps_anchor = anchor
        self._anchor: Anchor | None = None
        self._hooks: list[weakref.ref[OptimizerHook]] = []
        check_patterns(model, exclude, "exclude")
        scan = scan_layers(model, self.rules)
        if isinstance(threshold, Mapping):
            check_patterns(model, threshold, "threshold", scan.layers)
        for layer in scan.layers.values():  # better now than after a task has been trained
            find_threshold(threshold, layer, 0)
        self._protected = ProtectedModel(model, scan)
        _warn_of_unknown_types(model, scan)

    @classmethod
    def from_file(cls, model: nn.Module, path: str | os.PathLike[str], **overrides: Any) -> Self:
        """Return a memory with the settings and the contents of a file that :meth:`save` wrote.

        Args:
            model: The model that the memory is of.
            path: Path of the file.
            overrides: Settings that replace those of the file. A threshold that is a function cannot be stored, so it
                must be given.
        """
        state = storage.read(path)
        _check_complete(state)
        settings = dict(state["settings"])
        if "threshold" not in overrides and FUNCTION in _list_thresholds(settings["threshold"]):
            raise ValueError(f"the memory at {os.fspath(path)!r} has a function as its threshold: give threshold=")
        numerics = Numerics(**settings.pop("numerics"))
        memory = cls(model, **({"numerics": numerics} | settings | overrides))
        memory.load_state_dict({**state, "settings": memory._describe_settings()})
        return memory

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self._describe_settings().items())
        return f"GradientMemory(layers={len(self._protected.layers)}, tasks={self.tasks}, {settings})"

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle or a copy of the memory holds; hooks of optimizers stay with the original."""
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
        """The model that is protected."""
        return self._protected.model

    @property
    def tasks(self) -> int:
        """Number of tasks in the memory."""
        return self._protected.tasks

    @property
    def exclude(self) -> tuple[str, ...]:
        """Patterns on names of modules and parameters that are left free."""
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
        self._protected.check_not_temporary("weights would be compared that are undone at its end")
        self._protected.flush()
        return self._get_anchor()

    def attach(self, optimizer: Optimizer, *, mode: Mode = "auto", every: int = 1) -> OptimizerHook:
        """Project every later step of an optimizer.

        Any ``torch.optim.Optimizer`` will do; it is not wrapped. To attach again, or to attach a new optimizer for
        each task, is fine, and costs nothing before the first update.

        Args:
            optimizer: Optimizer of parameters of the model; groups may be added later. Where a trainer has put a
                wrapper around it (Accelerate, Lightning), the optimizer inside is taken. With ``fully_shard`` build it,
                and attach it, after the model is sharded.
            mode: ``"auto"`` takes the cheapest mode that is exact for this optimizer and this step; ``"step"`` always
                projects the change that was applied; ``"gradient"`` projects the gradient, exact or not; ``"input"``
                tries to project the inputs of every linear layer, also where that saves nothing, and refuses an
                optimizer that it is not exact for. With gradient clipping the modes differ: ``"step"`` and
                ``"gradient"`` clip the gradient before it is projected, ``"input"`` (which ``"auto"`` may take for
                plain SGD) after.
            every: Number of steps whose change is projected at once. The cost is divided by it, and what is guaranteed
                holds at every such step; in between, ``hook.flush()`` projects now, and ``with hook.projected():``
                evaluates the weights as they would be. An update and every state dict flush first; an average of
                weights that is taken in between is not projected. 1 is the paper's algorithm.

        Returns:
            A hook that shows the modes taken and can be detached.
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
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        own = [p for p in self.model.parameters() if id(p) in held]
        if not own:
            raise ValueError(
                "the optimizer holds none of the model's parameters: it was built for another model, or "
                "before this one's parameters were replaced (fully_shard replaces them: build the optimizer after it)"
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
    ) -> None:
        """Add the task that was just learned: bases and importances from the inputs of its layers.

        The model runs in eval mode without gradients and is left as it was: flags, norm statistics, random state. All
        layers are computed before any is stored, so an update that fails changes nothing.

        Where torch.distributed has been set up, every process calls this with its own shard of the data, and all end
        with the same memory, to the bit. A failure in one is raised in all. Where the model is sharded
        (``fully_shard``), a process with fewer batches runs its last one again while the others go on, uncounted.

        Args:
            batches: DataLoader or any iterable of batches: a tensor, a tuple whose first item is the input, or a dict
                that is passed as keywords. Tensors on the CPU are moved to the model's device.
            samples: Number of inputs to use, of shuffled data; a dict of numbers by pattern on layer names gives each
                layer its own. None uses all, in constant memory. Over several processes it is the number for all
                together.
            forward: Function that runs one batch through the model, for batches of any other kind.
            mask: Function that returns for a batch which positions of its sequences count, [samples, positions], or
                None if all do. Without it, padding is what the ``attention_mask`` of a batch leaves out, if it has
                one. An input whose first two dimensions are others is taken whole.
            budget: Bytes for the Gram matrices of one pass over the data. Layers that do not fit together take more
                passes; those that share bases count once and stay together.
            allow_unattached: Whether to go on though weights were changed by an optimizer that is not attached.
            distributed: Whether other processes take part.
        """
        processes = ProcessGroup(distributed)
        protected = self._protected
        processes.run_together(protected.find_shards)
        if protected.is_sharded and not distributed:
            raise ValueError("the model is sharded, so that no process can run it alone: leave distributed=False out")
        protected.flush()
        plan = processes.run_together(partial(self._plan_update, batches, samples, budget))
        if not allow_unattached:
            processes.run_together(self._check_attached)
        with full_precision(protected.device):
            subspaces = collect_subspaces(
                plan, processes, protected, batches, forward=forward, mask=mask, grow=self.grow_bases, store=self.store
            )
        _warn_of_unreached([name for name in plan.scan.layers if name not in subspaces])
        _warn_of_full(subspaces)
        tensors = copy_tensors(self.model) if self._keeps_anchor else None
        for name, subspace in subspaces.items():
            plan.scan.layers[name].subspace = subspace
        protected.replace(protected.tasks + 1, plan.scan)
        protected.fingerprint()
        self._anchor = None if tensors is None else Anchor(tensors, self._find_held_names())
        for hook in self._get_hooks():
            hook.refresh(has_grown=True)

    def grow_bases(self, bases: Bases, gram: InputGram, threshold: float, choose: Choice | None = None) -> Bases:
        """Return the bases of a layer after a task. A method that chooses bases by another rule overrides this.

        Args:
            bases: Bases before the task; empty at the first one.
            gram: Gram matrix of the layer's inputs.
            threshold: Threshold of the layer.
            choose: Function that returns the number of directions to add, instead of the fewest that reach the
                threshold.
        """
        return bases.grow(gram, threshold=threshold, alpha=self.alpha, numerics=self.numerics, choose=choose)

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
            batch: A batch as :meth:`update` would take it. It shows how many rows each layer makes of a sample
                (positions of a sequence, patches of an image), which layers share bases, and how long the model takes.
                Without it one row a sample is counted and the model's own time is left out.
            forward: As in :meth:`update`.
            mask: As in :meth:`update`.
            budget: As in :meth:`update`.
        """
        scan = rescan(self._protected, self.rules)
        limits = {n: limit for n, limit in find_limits(self.model, samples, scan.layers).items() if limit is not None}
        for name in scan.layers:
            if name not in limits:
                raise ValueError(f"samples: no pattern matches the layer {name!r}; add one, such as '*'")
        passes = group_passes(scan.layers.values(), budget)
        return plan_update(self.model, passes, limits, batch=batch, forward=forward, mask=mask)

    @torch.no_grad()
    def project(self, change: Tensor, layer: str, bias: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return a change of a layer's weight without what the memory blocks, for those who edit weights themselves.

        The change is projected as a step is, for every input that meets the weight: a weight that is tied between
        embedding and output layer from both sides, ``in_proj_weight`` of ``nn.MultiheadAttention`` for query, key and
        value.

        Args:
            change: Change of the layer's whole weight, in its shape. Of a sharded weight it may be a whole tensor, or a
                DTensor that is laid out as the weight is.
            layer: The layer's name in :meth:`summary`, or the module's name.
            bias: Change of the layer's whole bias, where that is protected with the weight.

        Returns:
            The projected change; with ``bias`` both.
        """
        members = self._find_layers_of_weight(layer)
        weight = members[0].weight.tensor
        held_bias = next((member.bias for member in members if member.bias is not None), None)
        _check_change(layer, change, weight, bias, held_bias)
        is_whole = as_dtensor(change) is None
        result = change.to(weight.device, copy=True)
        bias_result = None if bias is None else bias.to(weight.device, copy=True)
        local, local_bias = get_local(result), None if bias_result is None else get_local(bias_result)
        with full_precision(weight.device):
            for member in members:
                if member.subspace is not None:
                    own_bias = None if member.bias is None else local_bias
                    if is_whole:
                        member.project_whole_(local, own_bias)
                    else:
                        member.project_(local, own_bias)
        if bias is None or bias_result is None:
            return result.to(change.device)
        return result.to(change.device), bias_result.to(bias.device)

    @contextmanager
    def edit_weights(self, *, exclude: Sequence[str] = ()) -> Iterator[None]:
        """Edit protected weights by hand in the body, with changes that went through :meth:`project` for instance.

        At its end the weights are recorded as those of the last update: :meth:`check` compares with them, and the next
        update accepts them.

        Args:
            exclude: Further patterns on names of modules and parameters that are left free from here on. Bases of their
                layers are dropped.

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
            self._anchor = Anchor(copy_tensors(self.model), self._find_held_names())
        for hook in self._get_hooks():
            hook.refresh(has_grown=False)

    def set_importances(self, importances: Mapping[str, Tensor]) -> None:
        """Replace the importances of bases, for methods that learn them.

        Steps in the modes ``step`` and ``gradient`` follow at once; the input mode keeps those of the last update.

        Args:
            importances: Importances in [0, 1] of all bases of some layers, by layer. [groups, k]
        """
        for name, importance in importances.items():
            layer = self._protected.layers[name]
            assert layer.subspace is not None
            if importance.shape != layer.subspace.importance.shape:
                raise ValueError(
                    f"layer {name!r} has importances of shape {tuple(layer.subspace.importance.shape)}, got "
                    f"{tuple(importance.shape)}"
                )
            layer.subspace = layer.subspace.with_importance(importance.detach().clone())

    def capacity(self) -> Capacity:
        """Return what is protected and how much room is left, as data."""
        return measure_capacity(self._protected)

    def summary(self) -> Summary:
        """Return a table of what is protected, and of every parameter that is not with the reason. It prints itself."""
        return Summary(self.capacity(), self.tasks)

    def check(
        self,
        batch: Any,
        *,
        forward: Callable[[Any], Any] | None = None,
        mask: Callable[[Any], Tensor | None] | None = None,
        reference: Mapping[str, Tensor] | None = None,
    ) -> Check:
        """Measure how training since the last update has changed what the model does with a batch.

        Where the model is sharded every process calls this, each with a batch of its own.

        Args:
            batch: Any batch that :meth:`update` would take.
            forward: As in :meth:`update`.
            mask: As in :meth:`update`. The outputs of the model are compared at all positions.
            reference: A ``state_dict`` of the model to compare with, instead of the weights as of the last update.
        """
        if self.tasks == 0:
            raise RuntimeError("there is nothing to check before the first update")
        reference = reference or self._get_anchor()
        self._protected.find_shards()
        with full_precision(self._protected.device):
            return measure_changes(self._protected, batch, reference, forward, mask)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the memory knows, as tensors and plain values."""
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
        """Continue from a :meth:`state_dict`.

        Raises:
            ValueError: The state has other settings than this memory, or does not fit the model; the message names
                them. Nothing has changed then.
        """
        protected = self._protected
        protected.check_not_temporary("another memory would project what was stepped with this one")
        _check_complete(state)
        self._check_settings(state["settings"])
        protected.find_shards()
        scan = self._scan_for(state["subspaces"])
        missing = [layer.name for layer in scan.layers.values() if layer.subspace is None]
        if missing and len(missing) < len(scan.layers):
            warn_caller(f"the saved memory has no bases for {', '.join(missing)}")
        protected.norm_statistics.load_state_dict(copy.deepcopy(state["statistics"]), self.model)
        protected.flush()  # with the bases that the steps were taken with
        protected.replace(int(state["tasks"]), scan)
        for name, parameter in scan.parameters.items():
            parameter.fingerprint = state["fingerprints"].get(name)
            parameter.is_stepped = name in state["trained"]
        for name, layer in scan.layers.items():
            layer.is_input_proven = state["proved"].get(name)
        is_same = self.tasks > 0 and not any(parameter.has_changed() for parameter in scan.parameters.values())
        has_anchor = self._keeps_anchor and is_same
        self._anchor = Anchor(copy_tensors(self.model), self._find_held_names()) if has_anchor else None
        for hook in self._get_hooks():
            hook.refresh(has_grown=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the memory to a safetensors file, whole or not at all."""
        storage.write(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read a file that :meth:`save` wrote. Nothing in the file is executed; a damaged one changes nothing."""
        self.load_state_dict(storage.read(path))

    def _get_hooks(self) -> list[OptimizerHook]:
        """Return the attached hooks, oldest first, and forget the others."""
        hooks = [hook for hook in (reference() for reference in self._hooks) if hook is not None and hook.is_attached]
        self._hooks = [weakref.ref(hook) for hook in hooks]
        return hooks

    def _plan_update(self, batches: Iterable[Any], samples: int | Mapping[str, int] | None, budget: int) -> UpdatePlan:
        """Prepare an update, and refuse everything that can be wrong before any data are read."""
        check_not_single_batch(batches)
        protected = self._protected
        protected.check_not_temporary("an update would be of weights that are undone at its end")
        protected.norm_statistics.restore()
        check_patterns(self.model, self.exclude, "exclude")
        scan = rescan(protected, self.rules)
        thresholds = {name: find_threshold(self.threshold, each, self.tasks) for name, each in scan.layers.items()}
        limits = find_limits(self.model, samples, scan.layers)
        passes = group_passes(scan.layers.values(), budget)
        check_passes(passes, batches, budget)
        return UpdatePlan(scan, thresholds, limits, passes)

    def _check_attached(self) -> None:
        """Refuse an update after a training that nobody projected: it would promise what is lost already."""
        for parameter in self._protected.scan.parameters.values():
            if not parameter.is_stepped and parameter.has_changed() and not self._has_only_grown(parameter):
                raise RuntimeError(
                    f"layer {parameter.name.rpartition('.')[0] or '(model)'!r} was trained by an optimizer that is not "
                    f"attached, so older tasks were not protected ({parameter.name} has changed): call "
                    "memory.attach(optimizer) before training, or update(..., allow_unattached=True)"
                )

    def _has_only_grown(self, parameter: ProtectedParameter) -> bool:
        """Return whether a parameter has more rows than at the last update, and the earlier ones are unchanged."""
        now = parameter.tensor
        then = None if self._anchor is None else self._anchor.get(parameter.name)
        if then is None or not has_grown(then, now):
            return False
        return torch.equal(gather_whole(then).to(now.device), gather_whole(now)[: len(then)])

    def _find_held_names(self) -> frozenset[str]:
        """Return the names of all protected parameters, and of the frozen ones but for those that are not trained."""
        scan = self._protected.scan
        protected = {parameter.name for layer in scan.layers.values() for parameter in layer.parameters}
        return frozenset(protected | {name for name in scan.frozen if scan.parameters[name].tensor.requires_grad})

    def _find_layers_of_weight(self, layer: str) -> list[ProtectedLayer]:
        """Return all layers of the weight of a layer, which is named as such or as its module."""
        layers = self._protected.layers
        named = [layers[layer]] if layer in layers else []
        if not named:
            owners = find_owners(self._protected)
            named = [each for each in layers.values() if layer in owners[each.weight.name]]
        if not named:
            near = get_close_matches(layer, layers, n=3, cutoff=0.0)
            raise ValueError(f"no layer {layer!r} is protected; there is {', '.join(near)}")
        if any(each.weight is not named[0].weight for each in named):
            names = ", ".join(each.name for each in named)
            raise ValueError(f"{layer!r} has several weights: give the change of one of {names}")
        members = [each for each in layers.values() if each.weight is named[0].weight]
        if len({each.bias for each in members if each.bias is not None}) > 1:
            names = ", ".join(each.name for each in members)
            raise ValueError(f"layer {layer!r}: {names} are parts of one weight with biases of their own; take a step")
        return members

    def _get_anchor(self) -> Anchor:
        if self._anchor is None:
            raise RuntimeError(
                "the weights as of the last update are not available (anchor=False, there was no update, or the memory "
                "was loaded into a model that has trained on): pass reference=, a state_dict of the model"
            )
        return self._anchor

    def _describe_settings(self) -> dict[str, Any]:
        """Return the settings that decide what the memory computes, as plain values."""
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
        }

    def _check_settings(self, saved: Mapping[str, Any]) -> None:
        own = self._describe_settings()
        differing = [f"{n}={saved[n]!r} (here {own[n]!r})" for n in own if n in saved and saved[n] != own[n]]
        if differing:
            raise ValueError(
                f"the saved memory has other settings: {', '.join(differing)}. Make the memory with these, or with "
                "GradientMemory.from_file, whose keywords replace settings of the file"
            )

    def _scan_for(self, saved: Sequence[Mapping[str, Any]]) -> Scan:
        """Sort the model's parameters for saved subspaces, and hand these over to their layers."""
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
    """Return the model inside of compiled and data-parallel wrappers, which has the names, hooks and weights."""
    inside = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return _unwrap_model(inside) if isinstance(inside, nn.Module) else model


def _unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside a wrapper that only passes steps on and was never set up as an optimizer itself.

    One that was (Lookahead, say) may change weights in its own step, and has hooks around it.
    """
    inside = getattr(optimizer, "optimizer", None)
    has_hooks = "_optimizer_step_pre_hooks" in vars(optimizer)
    return _unwrap_optimizer(inside) if isinstance(inside, Optimizer) and not has_hooks else optimizer


def _check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def _check_complete(state: Mapping[str, Any]) -> None:
    missing = [key for key in STATE if key not in state]
    if missing:
        raise ValueError(f"this is not the state of a memory, or one of another version: it lacks {', '.join(missing)}")


def _describe_threshold(threshold: Threshold) -> float | str:
    return FUNCTION if callable(threshold) else float(threshold)


def _list_thresholds(threshold: Any) -> list[Any]:
    return list(threshold.values()) if isinstance(threshold, Mapping) else [threshold]


def _check_change(
    layer: str, change: Tensor, weight: Tensor, bias: Tensor | None, held_bias: ProtectedParameter | None
) -> None:
    """Raise if the change of a weight, or of its bias, does not fit."""
    if bias is None and held_bias is not None:
        raise ValueError(
            f"layer {layer!r}: its bias {held_bias.name} changes with the weight: give bias=, zeros if it does "
            "not change"
        )
    if bias is not None and held_bias is None:
        raise ValueError(f"layer {layer!r}: its bias is not protected with the weight, so leave bias= out")
    is_whole = as_dtensor(change) is None
    own_bias = None if held_bias is None else held_bias.tensor
    for name, given, own in (("change", change, weight), ("bias", bias, own_bias)):
        if given is None or own is None:
            continue
        if given.shape != own.shape:
            raise ValueError(f"{name} has shape {tuple(given.shape)}, layer {layer!r} has {tuple(own.shape)}")
        if not has_same_layout(given, change if is_whole else own):
            raise ValueError(f"{name}: give whole tensors, or DTensors that are laid out as those of layer {layer!r}")


def _check_fit(layer: ProtectedLayer, subspace: Bases) -> None:
    """Raise if a subspace of a file does not fit a layer."""
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
    """Warn once if parameters will be frozen since the type of their module is unknown."""
    names = [name for name, reason in scan.frozen.items() if reason.startswith(UNKNOWN_TYPE)]
    if not names:
        return
    types = sorted({scan.frozen[name].removeprefix(UNKNOWN_TYPE).split(",")[0].strip() for name in names})
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    share = sum(sizes[name] for name in names) / max(1, sum(sizes.values()))
    warn_caller(
        f"{', '.join(types)}: unknown layer type{'s' * (len(types) > 1)}, with {share:.1%} of all parameters, which "
        "will be frozen after the first task. Register the type with sgp.register_layer, exclude it, or set rest='free'"
    )


def _warn_of_unreached(names: Sequence[str]) -> None:
    if names:
        warn_caller(
            f"no input reached {', '.join(names)} in this update, or the mask left nothing of it, so nothing of this "
            "task is protected there; exclude what is not meant to be protected"
        )


def _warn_of_full(subspaces: Mapping[str, Bases]) -> None:
    """Warn once of all layers that have hardly any free capacity left."""
    full = {name: 1 - space.free for name, space in subspaces.items() if 1 - space.free > NEARLY_FULL}
    if full:
        listed = ", ".join(f"{name!r} ({share:.1%})" for name, share in full.items())
        warn_caller(
            f"nearly all of the capacity is blocked in {listed}, which can hardly learn any more: a lower threshold or "
            "alpha, fewer samples or a wider layer leave more room"
        )
