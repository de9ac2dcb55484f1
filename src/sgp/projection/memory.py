"""GradientMemory: the subspaces of a whole model, and everything a user does with them."""

from __future__ import annotations

import copy
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sgp import storage
from sgp.patterns import check_patterns, find_pattern
from sgp.projection.capacity import Capacity, capacity_of, print_table
from sgp.projection.check import Check, check, has_grown, refuse_unfit, tensors_of
from sgp.projection.collect import collect_inputs, warn_unless_shuffled
from sgp.projection.distributed import ProcessGroup
from sgp.projection.gram import FLOAT32_THRESHOLD, InputGram
from sgp.projection.layout import NOT_TRAINED, BiasRule, Guard, Layout, layout_of
from sgp.projection.optim import ROADS, Handle, Road, project, refuse_inside, warn_if_inexact
from sgp.projection.plan import Plan, plan
from sgp.projection.protection import Protection
from sgp.projection.realign import heads_of, realign
from sgp.projection.sharded import as_dtensor, gather_whole, get_local, has_same_layout
from sgp.projection.subspace import STORES, Bases, Numerics, Store, Subspace
from sgp.projection.tokens import TokenCounts, TokenSubspace, load_bases

Threshold = float | Callable[[int], float]
Preset = Literal["paper", "reference", "corrected"]

# What the text says and what is right are the same inside an update; they part in the benchmarks around it.
PRESETS: dict[str, tuple[Numerics, BiasRule]] = {
    "paper": (Numerics(), "protect"),
    "reference": (Numerics(first_rank="one-less", truncation="after", orthogonalise=False), "freeze"),
    "corrected": (Numerics(), "protect"),
}
# Statistics of as many layers are gathered in one pass over the data as fit in this.
DEFAULT_BUDGET = 2 * 2**30
# A layer whose mean importance exceeds this can hardly learn any more.
NEARLY_FULL = 0.95

V = TypeVar("V")


class GradientMemory:
    """Learn the next task without losing the last one: scaled gradient projection (Saha & Roy, AAAI 2023).

    After each task :meth:`update` finds the directions that the inputs of each layer span, and how much each
    matters. Attached to an optimizer, the memory scales every later step along them by one minus that
    importance::

        memory = sgp.GradientMemory(model, threshold=0.97, alpha=10, exclude=["heads.*"])
        memory.attach(optimizer)
        for task in tasks:
            train(model, optimizer, task)
            memory.update(task.loader)

    The model is not wrapped or changed in any way, and no data are kept.

    Args:
        model: any module. Linear layers (GPT-2's ``Conv1D`` too), convolutions, embeddings,
            ``nn.MultiheadAttention`` and every type given to :func:`sgp.register_layer` are protected.
        threshold: epsilon_th, the share of each layer's input energy that the bases must hold, in (0, 1]; or
            a function of the task's index (from 0) that gives it; or a dict of either by pattern on layer
            names, of which the first that matches counts. How many samples an update uses matters as much as
            this, so there is no default.
        alpha: scale coefficient of Eq. 2, at least 0. Larger protects more; ``math.inf`` is GPM exactly.
        exclude: patterns (as in ``fnmatch``) on qualified module and parameter names that are left free, such
            as the heads of single tasks.
        bias: ``"protect"`` treats a bias as the weight of one more input that is always 1, ``"freeze"`` keeps
            it after the first task. None is the preset's.
        rest: what happens to all other parameters (norm layers, unknown layer types) and to running
            statistics after the first task: ``"freeze"`` or ``"free"``.
        strict: refuse a model with a layer type that is not known, instead of reporting it.
        preset: ``"paper"`` is the text, ``"reference"`` the published code with its quirks, ``"corrected"``
            what is right.
        numerics: single choices of the preset, if wanted otherwise.
        anchor: keep a copy of the model's weights at each update for :meth:`check` to compare with.
        store: what bases are kept as. ``"bfloat16"`` takes half the bytes of ``"float32"`` and ``"int8"`` a quarter;
            steps compute with the rounded bases, so a little of each step leaks (docs/limits.md has figures).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        threshold: Threshold | Mapping[str, Threshold],
        alpha: float = 10.0,
        exclude: Sequence[str] = (),
        bias: BiasRule | None = None,
        rest: Literal["freeze", "free"] = "freeze",
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
        _one_of("preset", preset, PRESETS)
        _one_of("bias", bias, (None, "protect", "freeze"))
        _one_of("rest", rest, ("freeze", "free"))
        _one_of("store", store, STORES)
        for value in threshold.values() if isinstance(threshold, Mapping) else [threshold]:
            if not callable(value):
                _check_threshold(value, "threshold")
        model = _unwrapped(model)
        self.threshold = threshold
        self.alpha = float(alpha)
        self.exclude = tuple(exclude)
        self.bias: BiasRule = bias or PRESETS[preset][1]
        self.rest = rest
        self.strict = strict
        self.store: Store = store
        self.numerics = numerics or PRESETS[preset][0]
        self._keep_anchor = anchor
        self._anchor: dict[str, Tensor] | None = None
        check_patterns(model, self.exclude, "exclude")
        layout = self._scan(model)
        if isinstance(threshold, Mapping):
            check_patterns(model, threshold, "threshold", layout.guards)
        self._protection = Protection(model, layout)
        for guard in layout.guards.values():  # better now than after a task has been trained
            self._threshold(guard)

    @property
    def model(self) -> nn.Module:
        """The model that is protected."""
        return self._protection.model

    @property
    def tasks(self) -> int:
        """How many tasks the memory holds."""
        return self._protection.tasks

    @property
    def subspaces(self) -> dict[str, Bases]:
        """Bases and importances by layer."""
        return dict(self._protection.subspaces)

    def attach(self, optimizer: Optimizer, *, road: Road = "auto", every: int = 1) -> Handle:
        """Project every later step of an optimizer.

        Any ``torch.optim.Optimizer`` will do; it is not wrapped. Attaching again, or a new optimizer for each
        task, is fine, and costs nothing before the first update.

        Args:
            optimizer: holds parameters of the model; groups may be added later. Where a trainer has put a wrapper
                around it (Accelerate, Lightning), the one inside is taken. With ``fully_shard`` build it, and attach
                it, after the model is sharded.
            road: ``"auto"`` takes the cheapest road that is exact for this optimizer and this step; ``"applied"``
                always projects what was applied; ``"gradient"`` projects the gradient, exact or not; ``"input"``
                tries the input side of every linear layer, also where it can gain nothing, and refuses an optimizer
                that it is not exact for. With gradient clipping the roads differ: ``"applied"`` and ``"gradient"``
                clip what is not projected yet, the input side (which ``"auto"`` may take for plain SGD) what is.
            every: project the change of as many steps at once. The cost is divided by it, and what is guaranteed holds
                at every such step; in between, ``handle.flush()`` projects now, and ``with handle.projected():``
                evaluates the weights as they would be. An update and every state dict flush first. 1 is the paper's
                algorithm.

        Returns:
            A handle that tells the roads taken and detaches.
        """
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"attach takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
        optimizer = _bare(optimizer)
        _one_of("road", road, ROADS)
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number of at least 1, got {every!r}")
        if every > 1 and road not in ("auto", "applied"):
            raise ValueError(f"road={road!r} acts on every single step; every={every} needs road='auto' or 'applied'")
        self._protection.look_for_shards()
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        ours = {id(p): p for p in self.model.parameters() if id(p) in held}
        if not ours:
            raise ValueError(
                "the optimizer holds none of the model's parameters: it was built for another model, or "
                "before this one's parameters were replaced (fully_shard replaces them: build the optimizer after it)"
            )
        self._protection.subspaces = _following(self._protection, self._protection.layout, self._protection.subspaces)
        warn_if_inexact(optimizer, road)
        half = sum(4 * get_local(p).numel() for p in ours.values() if p.dtype in (torch.float16, torch.bfloat16))
        if half:
            warnings.warn(
                "the model has 16-bit weights: the handle keeps a float32 master of those it guards (up "
                f"to {half / 1e6:.1f} MB), since the rounding of a step would leak",
                stacklevel=2,
            )
        for handle in self._protection.handles():
            if handle.holds(optimizer):
                handle.detach()
        handle = Handle(self._protection, optimizer, road, every)
        self._protection.add(handle)
        return handle

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

        The model runs in eval mode without gradients and is left as it was: flags, running statistics, random
        state. All layers are computed before any is stored, so an update that fails changes nothing.

        Where torch.distributed has been set up, every process calls this with its own shard of the data, and all end
        with the same memory, to the bit. A failure in one is raised in all. Where the model is sharded
        (``fully_shard``), a process with fewer batches runs its last one again while the others go on, uncounted.

        Args:
            batches: a DataLoader or any iterable of batches: a tensor, a tuple whose first item is the input,
                or a dict that is passed as keywords.
            samples: how many inputs to use, of shuffled data; a dict of numbers by pattern on layer names
                gives each layer its own. None uses all, in constant memory. Over several processes it is the number
                for all together.
            forward: runs one batch through the model, for batches of any other kind.
            mask: tells for a batch which positions of its sequences count, [samples, positions], or None if all do.
                Without it, padding is what the ``attention_mask`` of a batch leaves out, if it has one. An input whose
                first two dimensions are others is taken whole.
            budget: bytes for the statistics of one pass over the data. Layers that do not fit together take
                more passes; those that share bases count once and stay together.
            allow_unattached: go on though weights were changed by an optimizer that is not attached.
            distributed: False leaves other processes out.
        """
        team = ProcessGroup(distributed)
        protection = self._protection
        team.run_together(protection.look_for_shards)
        if protection.is_sharded and not distributed:
            raise ValueError("the model is sharded, so that no process can run it alone: leave distributed=False out")
        protection.flush()
        layout, known, thresholds, limits, passes = team.run_together(partial(self._prepare, batches, samples, budget))
        if not allow_unattached:
            team.run_together(self._refuse_unattached)
        if any(limit is not None for limit in limits.values()):
            warn_unless_shuffled(batches)
        guards = layout.guards
        in_step = team.run_in_lockstep if protection.is_sharded else None
        shares = {name: team.split_samples(limit, batches) for name, limit in limits.items()}
        subspaces = known.copy()
        reached: set[str] = set()
        for members in passes:
            precise = {guard.name: thresholds[guard.name] > FLOAT32_THRESHOLD for guard in members}
            gather = partial(
                collect_inputs, forward=forward, samples=shares, precise=precise, mask=mask, in_step=in_step
            )
            collected = team.run_together(partial(gather, self.model, batches, members))
            statistics, found = team.merge_grams(collected)
            reached |= found
            grown = team.run_together(partial(self._grown, statistics, thresholds, known))
            subspaces |= team.broadcast_bases(grown)
        if not reached:
            raise ValueError(
                "none of the protected layers saw an input: is this the model that the batches run through, and does "
                "the mask leave any position?"
            )
        _warn_of_unreached([name for name in guards if name not in reached])
        _warn_of_full({name: subspaces[name] for name in guards if name in reached})

        anchor = self._copy_of_weights()
        protection.store(protection.tasks + 1, layout, {name: subspaces[name] for name in guards if name in subspaces})
        self._mark(anchor)
        for handle in protection.handles():
            handle.refresh(grown=True)

    def _prepare(
        self,
        batches: Iterable[Any],
        samples: int | Mapping[str, int] | None,
        budget: int,
    ) -> tuple[Layout, dict[str, Bases], dict[str, float], dict[str, int | None], list[list[Guard]]]:
        """What an update must know before it looks at any data: all that can be wrong without it is refused here."""
        _refuse_single_batch(batches)
        protection = self._protection
        refuse_inside(protection, "an update would be of weights that are undone at its end")
        protection.statistics.restore()
        check_patterns(self.model, self.exclude, "exclude")
        held = {name: subspace.dimension for name, subspace in protection.subspaces.items()}
        layout = self._scan(self.model, held)
        renamed = protection.renamed(layout)
        if renamed:
            layout = self._scan(self.model, held | {new: held[old] for old, new in renamed.items()})
        guards = layout.guards
        known = {renamed.get(name, name): subspace for name, subspace in protection.subspaces.items()}
        _warn_of_gone([name for name in known if name not in guards])
        known = _following(protection, layout, known)
        thresholds = {name: self._threshold(guard) for name, guard in guards.items()}
        limits = self._limits(samples, guards)
        passes = list(_passes(self.model, guards.values(), known, budget))
        if len(passes) > 1 and isinstance(batches, Iterator):
            raise ValueError(
                f"the statistics take {len(passes)} passes over the data and an iterator gives one: pass a "
                f"list or a DataLoader, or a larger budget= (bytes; now {budget})"
            )
        return layout, known, thresholds, limits, passes

    def plan(
        self,
        samples: int | Mapping[str, int],
        batch: Any = None,
        *,
        forward: Callable[[Any], Any] | None = None,
        mask: Callable[[Any], Tensor | None] | None = None,
        budget: int = DEFAULT_BUDGET,
    ) -> Plan:
        """How many bytes and seconds an update will take.

        Args:
            samples: as in :meth:`update`; each layer must have a number.
            batch: one to look at, as :meth:`update` would take it. It shows how many rows each layer makes of a
                sample (positions of a sequence, patches of an image), which layers share bases, and how long the
                model takes. Without it one row a sample is counted and the model's own time is left out.
            forward: as in :meth:`update`.
            mask: as in :meth:`update`.
            budget: as in :meth:`update`.
        """
        guards = self._scan(self.model).guards
        limits = {name: limit for name, limit in self._limits(samples, guards).items() if limit is not None}
        for name in guards:
            if name not in limits:
                raise ValueError(f"samples: no pattern matches the layer {name!r}; add one, such as '*'")
        passes = list(_passes(self.model, guards.values(), self._protection.subspaces, budget))
        dimensions = {name: _dimensions(self.model, guard) for name, guard in guards.items()}
        return plan(self.model, passes, dimensions, limits, batch=batch, forward=forward, mask=mask)

    @torch.no_grad()
    def project(self, change: Tensor, layer: str, bias: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """A change of a layer's weight without what the memory blocks, for those who edit weights themselves.

        It is projected as a step is, for every input that meets the weight: a weight that is tied between embedding and
        output layer from both sides, ``in_proj_weight`` of ``nn.MultiheadAttention`` for query, key and value.

        Args:
            change: of the layer's whole weight, in its shape. Of a sharded weight it may be a whole tensor, or a
                DTensor that is laid out as the weight is.
            layer: as :meth:`summary` calls it, or the module's name.
            bias: the change of the layer's whole bias, where that is protected with the weight.

        Returns:
            The projected change; with ``bias`` both.
        """
        protection = self._protection
        weight_name, guards = self._guards_of_weight(layer)
        weight = protection.parameter(weight_name)
        bias_name = next((guard.bias for guard in guards if guard.bias is not None), None)
        offset = None if bias_name is None else protection.parameter(bias_name)
        if (bias is None) != (offset is None):
            raise ValueError(
                f"layer {layer!r}: "
                + (
                    f"its bias {bias_name} changes with the weight: give bias=, zeros if it does not change"
                    if bias is None
                    else "its bias is not protected with the weight, so leave bias= out"
                )
            )
        is_whole = as_dtensor(change) is None
        for name, given, own in (("change", change, weight), ("bias", bias, offset)):
            if given is not None and own is not None and given.shape != own.shape:
                raise ValueError(f"{name} has shape {tuple(given.shape)}, layer {layer!r} has {tuple(own.shape)}")
            if given is not None and own is not None and not has_same_layout(given, change if is_whole else own):
                raise ValueError(
                    f"{name}: give whole tensors, or DTensors that are laid out as those of layer {layer!r}"
                )
        change, bias = change.clone(), None if bias is None else bias.clone()
        for guard in guards:
            if guard.name in protection.subspaces:
                part = (guard.block, protection.subspace_for(guard)) if is_whole else protection.part(guard)
                project(*part, get_local(change), None if bias is None or guard.bias is None else get_local(bias))
        return change if bias is None else (change, bias)

    @torch.no_grad()
    def project_since(self, before: Mapping[str, Tensor], share: float = 1.0) -> None:
        """Project the change of all protected weights since some moment once more, for those who chose what to keep.

        A step along a basis is scaled by one minus its importance, so many steps in one direction still lead far. The
        change that they come to, or that of a mean of weights that they passed, can be scaled itself: the weights are
        then where a single step of that size would have led.

        Args:
            before: the weights, and biases that are protected with them, at that moment; by their names in the model.
            share: how far the weights go from where they are to where the projection has them, in [0, 1].
        """
        # Written so that NaN fails too.
        if not 0 <= share <= 1:
            raise ValueError(f"share must be in [0, 1], got {share}")
        self._protection.flush()
        layers = {guard.weight: guard.name for guard in self._protection.active()}
        found = {weight: self._guards_of_weight(layer)[1] for weight, layer in layers.items()}
        parameters = {weight: list(dict.fromkeys(n for g in found[weight] for n in g.parameters)) for weight in layers}
        missing = [name for names in parameters.values() for name in names if name not in before]
        if missing:
            raise ValueError(f"before lacks what is protected: {', '.join(missing)}")
        for weight, names in parameters.items():
            own = [self._protection.parameter(name) for name in names]
            changes = [parameter - before[name] for parameter, name in zip(own, names, strict=True)]
            projected = self.project(changes[0], layers[weight], *changes[1:])
            for name, parameter, change in zip(names, own, projected if names[1:] else (projected,), strict=True):
                parameter.lerp_(before[name] + change, share)

    def _guards_of_weight(self, layer: str) -> tuple[str, list[Guard]]:
        """The weight of a layer, which may be named as its guard or its module, and all guards of that weight."""
        guards = self._protection.layout.guards
        named = [guards[layer]] if layer in guards else []
        if not named:
            owners = _owners(self._protection)
            named = [guard for guard in guards.values() if layer in owners[guard.weight]]
        if not named:
            near = get_close_matches(layer, guards, n=3, cutoff=0.0)
            raise ValueError(f"no layer {layer!r} is protected; there is {', '.join(near)}")
        weight = named[0].weight
        if any(guard.weight != weight for guard in named):
            names = ", ".join(guard.name for guard in named)
            raise ValueError(f"{layer!r} has several weights: give the change of one of {names}")
        members = [guard for guard in guards.values() if guard.weight == weight]
        if len({guard.bias for guard in members} - {None}) > 1:
            names = ", ".join(guard.name for guard in members)
            raise ValueError(f"layer {layer!r}: {names} are parts of one weight with biases of their own; take a step")
        return weight, members

    def weigh(self, importances: Mapping[str, Tensor]) -> None:
        """Give bases other importances in [0, 1] than the update did, for methods that learn them.

        Steps on the roads ``applied`` and ``gradient`` follow at once; the input side is of the last update.

        Args:
            importances: of all bases of some layers, by layer. [groups, k]
        """
        for name, importance in importances.items():
            old = self._protection.subspaces[name]
            if importance.shape != old.importance.shape:
                raise ValueError(
                    f"layer {name!r} has importances of shape {tuple(old.importance.shape)}, got "
                    f"{tuple(importance.shape)}"
                )
            self._protection.subspaces[name] = old.with_importance(importance.detach().clone())

    def capacity(self) -> Capacity:
        """What is protected and how much room is left, as data."""
        layout, dimensions = self._protection.layout, {}
        for name, guard in layout.guards.items():
            dimensions[name] = _dimensions(self.model, guard)
        return capacity_of(layout, self._protection.subspaces, dimensions, _owners(self._protection))

    def summary(self, console: Console | None = None) -> None:
        """Print a table of what is protected, and name every parameter that is not, with the reason."""
        print_table(self.capacity(), self.tasks, console or Console())

    def check(
        self,
        batch: Any,
        *,
        forward: Callable[[Any], Any] | None = None,
        mask: Callable[[Any], Tensor | None] | None = None,
        reference: Mapping[str, Tensor] | None = None,
    ) -> Check:
        """How training since the last update has changed what the model does with a batch.

        Args:
            batch: any batch that :meth:`update` would take.
            forward: as in :meth:`update`.
            mask: as in :meth:`update`. The outputs of the model are compared at all positions.
            reference: a ``state_dict`` of the model to compare with, instead of the weights as of the last
                update.

        Where the model is sharded every process calls this, and is told of its own batch.
        """
        if self.tasks == 0:
            raise RuntimeError("there is nothing to check before the first update")
        reference = self._weights_of_last_update(reference)
        self._protection.look_for_shards()
        return check(self._protection, batch, reference, forward, mask)

    def realign(
        self,
        heads: nn.Linear | Iterable[nn.Linear],
        batches: Iterable[Any],
        *,
        features: Callable[[Any], Tensor],
        reference: Mapping[str, Tensor] | None = None,
        distributed: bool = True,
    ) -> None:
        """Let heads of earlier tasks follow the features that a task has moved; call it before the task's update.

        They are fitted by least squares to the answers that they gave to the task's inputs before it was learned::

            train(model, optimizer, task)
            memory.realign(model.heads[:2], task.loader, features=lambda batch: model.features(batch[0]))
            memory.update(task.loader)

        The model runs in eval mode without gradients and is left as it was, but for these heads. Where
        torch.distributed has been set up, every process calls this with its own shard of the data.

        Args:
            heads: linear layers of earlier tasks, which read the same features; none is a protected layer.
            batches: of the task that was just learned.
            features: runs the model on a batch up to what the heads read, [..., d].
            reference: a ``state_dict`` of the model before the task, instead of the weights as of the last update.
            distributed: False leaves other processes out.
        """
        protection = self._protection
        own = heads_of(self.model, [heads] if isinstance(heads, nn.Linear) else heads)
        for name in own:
            self._refuse_held_head(name)
        _refuse_single_batch(batches)
        protection.look_for_shards()
        if protection.is_sharded:
            raise ValueError("realign is not for sharded models, whose earlier weights are in parts on many processes")
        if not own:
            return
        refuse_inside(protection, "heads would be fitted to weights that are undone at its end")
        protection.flush()
        reference = self._weights_of_last_update(reference)
        refuse_unfit(reference, protection, list(protection.layout.guards.values()))
        realign(self.model, own, batches, features, reference, ProcessGroup(distributed))

    def _refuse_held_head(self, name: str) -> None:
        """The memory would take its change for training that nobody projected."""
        layout = self._protection.layout
        guarded = {parameter for guard in layout.guards.values() for parameter in guard.parameters}
        frozen = {parameter for parameter, why in layout.frozen.items() if why != NOT_TRAINED}
        if any(f"{name}.{part}" in guarded | frozen for part in ("weight", "bias")):
            raise ValueError(f"{name!r} is protected, and a head of an earlier task is free: exclude=[{name + '.*'!r}]")

    def _weights_of_last_update(self, given: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        """Or those that were given in their place."""
        found = given or self._anchor
        if found is None:
            raise RuntimeError(
                "the weights as of the last update are not here (anchor=False, there was none, or the memory was "
                "loaded into a model that has trained on): pass reference=, a state_dict of the model"
            )
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything the memory knows, as tensors and plain values."""
        protection = self._protection
        shared: dict[int, dict[str, Any]] = {}
        for name, subspace in protection.subspaces.items():
            entry = shared.setdefault(id(subspace), {"layers": []} | subspace.state_dict())
            entry["layers"].append(name)
        return {
            "format": storage.FORMAT,
            "tasks": protection.tasks,
            "subspaces": list(shared.values()),
            "statistics": protection.statistics.state_dict(),
            "fingerprints": dict(protection.fingerprints),
            "trained": sorted(protection.trained),
            "proved": dict(protection.proved),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state_dict`.

        Raises:
            ValueError: it does not fit the model; the message names the layer and both shapes. Nothing has
                changed then.
        """
        refuse_inside(self._protection, "another memory would project what was stepped with this one")
        self._protection.look_for_shards()
        saved = []
        for entry in state["subspaces"]:
            tensors = {name: value.clone() for name, value in entry.items() if isinstance(value, Tensor)}
            saved.append((entry["layers"], load_bases(tensors)))
        layout = self._scan(self.model, {name: space.dimension for layers, space in saved for name in layers})
        subspaces: dict[str, Bases] = {}
        for layers, subspace in saved:
            for name in layers:
                guard = layout.guards.get(name)
                if guard is None:
                    known = ", ".join(layout.guards)
                    raise ValueError(f"layer {name!r} of the saved memory is not in the model, which has {known}")
                expected = _dimensions(self.model, guard)
                subspace = subspace.resize(expected[1])
                _check_fit(name, subspace, expected, guard)
                subspaces[name] = subspace
        missing = [name for name in layout.guards if name not in subspaces]
        if missing and subspaces:
            warnings.warn(f"the saved memory has no bases for {', '.join(missing)}", stacklevel=2)
        protection = self._protection
        protection.statistics.load_state_dict(copy.deepcopy(state["statistics"]), self.model)
        protection.flush()  # by the bases that the steps were taken with
        protection.store(int(state["tasks"]), layout, {n: subspaces[n] for n in layout.guards if n in subspaces})
        protection.fingerprints = dict(state["fingerprints"])
        protection.trained = set(state["trained"])
        protection.proved = dict(state["proved"])
        same = not any(protection.has_changed(name) for name in protection.fingerprints)
        self._anchor = self._copy_of_weights() if same and protection.tasks else None
        for handle in protection.handles():
            handle.refresh(grown=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the memory to a safetensors file, whole or not at all."""
        storage.write(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read what :meth:`save` wrote. Nothing in the file is executed; a damaged one changes nothing."""
        self.load_state_dict(storage.read(path))

    def __repr__(self) -> str:
        layers = len(self._protection.layout.guards)
        return (
            f"GradientMemory(layers={layers}, tasks={self.tasks}, threshold={self.threshold!r}, alpha={self.alpha:g})"
        )

    def _scan(self, model: nn.Module, held: Mapping[str, int] | None = None) -> Layout:
        layout = layout_of(model, exclude=self.exclude, bias=self.bias, rest=self.rest, strict=self.strict, held=held)
        if not layout.guards:
            raise ValueError(
                "the model has no layer to protect: every layer is excluded, not trained, or of a type "
                "that is not known (give it to sgp.register_layer)"
            )
        return layout

    def _threshold(self, guard: Guard) -> float:
        value = self.threshold
        if isinstance(value, Mapping):
            found = _by_pattern(value, guard)
            if found is None:
                raise ValueError(f"threshold: no pattern matches the layer {guard.name!r}; add one, such as '*'")
            value = found
        return _check_threshold(value(self.tasks) if callable(value) else value, f"threshold of layer {guard.name!r}")

    def _limits(self, samples: int | Mapping[str, int] | None, guards: Mapping[str, Guard]) -> dict[str, int | None]:
        if isinstance(samples, Mapping):
            check_patterns(self.model, samples, "samples", guards)
        limits: dict[str, int | None] = {}
        for name, guard in guards.items():
            limit = _by_pattern(samples, guard) if isinstance(samples, Mapping) else samples
            if limit is not None and limit < 1:
                raise ValueError(f"samples of layer {name!r} must be at least 1, got {limit}")
            limits[name] = limit
        return limits

    def _grown(
        self, statistics: Mapping[str, InputGram], thresholds: Mapping[str, float], known: Mapping[str, Bases]
    ) -> dict[str, Bases]:
        """New subspaces; guards that share statistic, bases and threshold go on sharing."""
        results: dict[tuple[int, int, float], Bases] = {}
        grown = {}
        for name, statistic in statistics.items():
            old = known.get(name)
            key = (id(statistic), id(old), thresholds[name])
            if key not in results:
                start = old or _empty(statistic)
                if (start.groups, start.dimension) != (statistic.groups, statistic.dimension):
                    raise ValueError(
                        f"layer {name!r} has changed: its inputs have {statistic.groups} x "
                        f"{statistic.dimension} dimensions, its bases {start.groups} x {start.dimension}"
                    )
                results[key] = self._grow(start, statistic, thresholds[name]).compress(self.store)
            grown[name] = results[key]
        return grown

    def _grow(self, start: Bases, statistic: InputGram, threshold: float) -> Bases:
        """One layer's subspace after a task; a method that chooses bases by a rule of its own overrides this."""
        return start.grow(statistic, threshold=threshold, alpha=self.alpha, numerics=self.numerics)

    def _refuse_unattached(self) -> None:
        """An update after training that nobody projected would promise what is lost already."""
        protection = self._protection
        for name in protection.fingerprints:
            if name not in protection.trained and protection.has_changed(name) and not self._has_only_grown(name):
                raise RuntimeError(
                    f"layer {name.rpartition('.')[0] or '(model)'!r} was trained by an optimizer that is not attached, "
                    f"so older tasks were not protected ({name} has changed): call memory.attach(optimizer) before "
                    "training, or update(..., allow_unattached=True)"
                )

    def _has_only_grown(self, name: str) -> bool:
        """Whether a parameter has more rows than at the last update, and those that it had are as they were."""
        then, now = (self._anchor or {}).get(name), self._protection.find(name)
        if then is None or now is None or not has_grown(then, now):
            return False
        return torch.equal(gather_whole(then).to(now.device), gather_whole(now)[: len(then)])

    def _mark(self, anchor: dict[str, Tensor] | None) -> None:
        """Note the weights as they are at an update."""
        protection = self._protection
        names = {name for guard in protection.active() for name in guard.parameters}
        held = {name for name in protection.layout.frozen if protection.parameter(name).requires_grad}
        protection.fingerprints = protection.fingerprint(sorted(names | held))
        protection.trained.clear()
        self._anchor = anchor

    def _copy_of_weights(self) -> dict[str, Tensor] | None:
        if not self._keep_anchor:
            return None
        return tensors_of(self.model)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Compiled and data-parallel models are wrappers; names, hooks and weights are those of the module inside."""
    inside = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
    return _unwrapped(inside) if isinstance(inside, nn.Module) else model


def _bare(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside a wrapper that only passes steps on: such a one was never set up as an optimizer itself.

    One that was (Lookahead, say) may change weights in its own step, and has hooks around it.
    """
    inside = getattr(optimizer, "optimizer", None)
    has_hooks = "_optimizer_step_pre_hooks" in vars(optimizer)
    return _bare(inside) if isinstance(inside, Optimizer) and not has_hooks else optimizer


def _one_of(name: str, value: object, choices: Iterable[object]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def _check_threshold(value: Any, what: str) -> float:
    if not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{what} must be in (0, 1], got {value!r}")
    return float(value)


def _refuse_single_batch(batches: Any) -> None:
    """One batch where an iterable of batches belongs would be taken apart into wrong ones."""
    is_pair = isinstance(batches, tuple) and len(batches) == 2 and all(isinstance(item, Tensor) for item in batches)
    if isinstance(batches, Tensor | Mapping) or (is_pair and batches[0].dim() != batches[1].dim()):
        raise TypeError("an iterable of batches is needed, and this looks like a single batch: pass [batch]")


def _by_pattern(values: Mapping[str, V], guard: Guard) -> V | None:
    """The value of the first pattern that matches a layer."""
    for pattern, value in values.items():
        if find_pattern(guard.name, [pattern]) or find_pattern(guard.weight, [pattern]):
            return value
    return None


def _owners(protection: Protection) -> dict[str, list[str]]:
    """Weight -> the modules that have it and whose inputs it is guarded for; more than one where it is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in protection.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    owners: dict[str, list[str]] = {}
    for guard in protection.layout.guards.values():
        places = names.get(id(protection.find(guard.weight)), [])
        # A block's weight may lie in a module inside the one that the block is of.
        inside = [place for place in places if any(_is_inside(place, source.module) for source in guard.sources)]
        found = owners.setdefault(guard.weight, [])
        found += [place or "(model)" for place in inside if (place or "(model)") not in found]
    return owners


def _is_inside(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def _dimensions(model: nn.Module, guard: Guard) -> tuple[int, int]:
    """Groups, and input dimension with the constant of a protected bias."""
    return guard.block.groups, guard.block.count_inputs(model.get_parameter(guard.weight)) + (guard.bias is not None)


def _following(protection: Protection, layout: Layout, subspaces: Mapping[str, Bases]) -> dict[str, Bases]:
    """Subspaces for the layers as they are now: those of tokens grow with the vocabulary.

    Raises:
        ValueError: a layer has other inputs than its bases are of.
    """
    resized: dict[tuple[int, int], Bases] = {}  # what was shared stays so
    following = {}
    for name, subspace in subspaces.items():
        guard = layout.guards.get(name)
        weight = None if guard is None else protection.find(guard.weight)
        if guard is not None and weight is not None:
            dimension = guard.block.count_inputs(weight) + (guard.bias is not None)
            subspace = resized.setdefault((id(subspace), dimension), subspace.resize(dimension))
            groups = guard.block.groups
            if (subspace.groups, subspace.dimension) != (groups, dimension):
                raise ValueError(
                    f"layer {name!r} has changed since the last update: its inputs have {groups} x {dimension} "
                    f"dimensions, its bases {subspace.groups} x {subspace.dimension}. Only a vocabulary may grow: make "
                    "the layer as it was, or go on with a new GradientMemory, which protects nothing of older tasks"
                )
        following[name] = subspace
    return following


def _passes(
    model: nn.Module, guards: Iterable[Guard], known: Mapping[str, Bases], budget: int
) -> Iterator[list[Guard]]:
    """Guards in lots whose Gram matrices fit in a budget together; what is not to be cut and does not fit goes alone.

    Only guards of one lot can share a statistic, and those that are cut apart once have bases of their own for good.
    Guards whose bases are shared stay together. What guards without bases will share is not known, but most of it is
    inside one module or one parent (query, key and value), so a lot ends between two parents wherever a parent fits.
    """
    lot: list[Guard] = []
    used = 0
    for _, group in itertools.groupby(_units(guards, known), key=lambda unit: _parent(unit, known)):
        units = list(group)
        sizes = [_bytes_of_unit(model, unit, known) for unit in units]
        if lot and used + sum(sizes) > budget:
            yield lot
            lot, used = [], 0
        for unit, size in zip(units, sizes, strict=True):
            if lot and used + size > budget:
                yield lot
                lot, used = [], 0
            lot += unit
            used += size
    yield lot


def _units(guards: Iterable[Guard], known: Mapping[str, Bases]) -> list[list[Guard]]:
    """Guards that are not to be cut apart: those of one subspace, or of one module where there is none yet."""
    units: dict[object, list[Guard]] = {}
    for guard in guards:
        key = id(known[guard.name]) if guard.name in known else guard.sources[0].module
        units.setdefault(key, []).append(guard)
    return list(units.values())


def _parent(unit: Sequence[Guard], known: Mapping[str, Bases]) -> object:
    """Where a unit lies, if it may come to share with its neighbours there; one that has bases will not."""
    if unit[0].name in known:
        return id(unit)
    return unit[0].sources[0].module.rpartition(".")[0]


def _bytes_of_unit(model: nn.Module, unit: Sequence[Guard], known: Mapping[str, Bases]) -> int:
    """At most; guards that have one subspace had one statistic and will again."""
    statistics = {id(known.get(guard.name, guard)): guard for guard in unit}
    return sum(_bytes_of_statistic(model, guard) for guard in statistics.values())


def _bytes_of_statistic(model: nn.Module, guard: Guard) -> int:
    """At most, of one guard."""
    groups, dimension = _dimensions(model, guard)
    return 8 * dimension if guard.layer_type.is_lookup else 8 * groups * dimension**2


def _empty(statistic: InputGram) -> Bases:
    """No bases, for inputs of a statistic's kind."""
    if isinstance(statistic, TokenCounts):
        return TokenSubspace.empty(statistic.dimension)
    return Subspace.empty(statistic.groups, statistic.dimension)


def _check_fit(name: str, subspace: Bases, expected: tuple[int, int], guard: Guard) -> None:
    found = (subspace.groups, subspace.dimension)
    if not subspace.is_consistent:
        raise ValueError(f"layer {name!r} of the saved memory is damaged: bases and importances differ in number")
    if found != expected:
        hint = "" if guard.bias is None and found[1] != expected[1] + 1 else " (a protected bias adds one)"
        raise ValueError(
            f"layer {name!r}: the saved memory has {found[0]} x {found[1]} input dimensions, the model "
            f"{expected[0]} x {expected[1]}{hint}"
        )


def _warn_of_gone(names: list[str]) -> None:
    if names:
        warnings.warn(
            f"{', '.join(names)} is gone from the model, and what the memory held of it with it",
            stacklevel=5,
        )


def _warn_of_unreached(names: list[str]) -> None:
    if names:
        warnings.warn(
            f"no input reached {', '.join(names)} in this update, or the mask left nothing of it, so nothing of this "
            "task is protected there; exclude what is not meant to be protected",
            stacklevel=3,
        )


def _warn_of_full(subspaces: Mapping[str, Bases]) -> None:
    for name, subspace in subspaces.items():
        if 1 - subspace.free > NEARLY_FULL:
            warnings.warn(
                f"layer {name!r} is {1 - subspace.free:.1%} blocked and can hardly learn any more: a lower "
                "threshold or alpha, fewer samples or a wider layer leave more room",
                stacklevel=3,
            )
