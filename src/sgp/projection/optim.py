"""What happens at ``optimizer.step()``.

Three roads lead to the same weights where they are open:

- ``applied``: keep the weights, let the optimizer step, project the difference. Exact for every optimizer,
  since nothing needs to be known of it; with Adam this is the paper's Adam-GP (Algorithm 2).
- ``gradient``: project the gradient before the step. Exact where the step is linear in the gradients: SGD
  without weight decay, with or without momentum.
- ``input``: as ``gradient``, but the gradient is already made from projected inputs (see ``input_side``).

The change of several steps can be projected at once (``every=n``), since the projection of a sum is the sum of the
projections: what is protected is then kept at those steps, and in between not quite.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from sgp.projection.layer_types import Block
from sgp.projection.layout import NOT_TRAINED, Guard
from sgp.projection.sharded import find_local_rows, get_local
from sgp.projection.subspace import Blocking
from sgp.projection.tokens import TokenSubspace

if TYPE_CHECKING:
    from sgp.projection.protection import Protection

Road = Literal["auto", "applied", "gradient", "input"]
ROADS = ("auto", "applied", "gradient", "input")
# A momentum buffer with less than this share along blocked directions has been projected.
PROJECTED = 1e-4


class Handle:
    """A memory attached to an optimizer. ``detach()`` ends it; so does the end of the optimizer.

    Attributes:
        every: the change of how many steps is projected at once.
        steps: how many the optimizer has taken since it was attached.
        reason: why a layer is not on a cheaper road, by layer, as of its last step.
    """

    def __init__(self, protection: Protection, optimizer: Optimizer, road: Road, every: int = 1) -> None:
        self.wanted = road
        self.every = every
        self.steps = 0
        self.reason: dict[str, str] = {}
        self._protection = protection
        self._optimizer = weakref.ref(optimizer)
        # An optimizer that is dropped without detaching must not leave inputs replaced behind.
        self._token = object()
        weakref.finalize(optimizer, _release, weakref.ref(protection), self._token)
        self._taken: dict[str, str] = {}
        self._kept: dict[str, Tensor] = {}  # weights as they were before the step; the buffers are used again
        self._masters: dict[str, Tensor] = {}
        self._pending: list[Guard] = []  # whose change since the weights were kept is still to be projected
        self._restore: list[str] = []
        self._lent: list[str] = []
        self._warned: set[str] = set()
        self._is_inside = False  # of :meth:`projected`
        self._projected: set[str] = set()  # guards whose momentum holds projected gradients only
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            # Momentum of another time may not have been projected.
            optimizer.register_load_state_dict_post_hook(lambda _: self.refresh(grown=False)),
        ]
        if every > 1:
            flush = _Flush(protection)
            self._hooks.append(optimizer.register_state_dict_pre_hook(flush))
            for module in protection.model.modules():  # state dicts are taken of parts too
                self._hooks.append(module.register_state_dict_pre_hook(flush))  # type: ignore[no-untyped-call]
                # Weights that are loaded are no change that steps have made.
                self._hooks.append(module.register_load_state_dict_pre_hook(flush))  # type: ignore[no-untyped-call]
        self.refresh(grown=False)

    @property
    def road(self) -> dict[str, str]:
        """The road each layer took at its last step, or will take at its first."""
        optimizer = self._optimizer()
        if optimizer is None:
            return dict(self._taken)
        planned, groups = {}, _groups(optimizer)
        for guard in self._guards(groups):
            side = self._protection.sides.get(guard.name)
            planned[guard.name], _ = self._road_of(guard, optimizer, groups, closure=False)
            if planned[guard.name] == "gradient" and side is not None and side.mode == "replace":
                planned[guard.name] = "input"
        return planned | {name: road for name, road in self._taken.items() if name in planned}

    def detach(self) -> None:
        """Leave the optimizer as it was before ``attach``. Buffers are freed."""
        self._refuse_inside("detach() would leave the weights as they were before, unprojected")
        self.flush()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._kept.clear()
        self._masters.clear()
        self._protection.release(self._token)

    @property
    def attached(self) -> bool:
        """Whether steps of the optimizer are still projected."""
        return bool(self._hooks) and self._optimizer() is not None

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether this is the handle of that optimizer."""
        return self.attached and self._optimizer() is optimizer

    @torch.no_grad()
    def flush(self) -> None:
        """Project what has been applied since the last projection, if that is not one step ago."""
        pending = self._pending
        self._await([])
        if not pending:
            return
        protection = self._protection
        protection.reshard()
        for guard in pending:
            self._put_back_tokens(guard)
        changes = {name: self._change(name) for name in _names(pending)}
        for guard in pending:
            self._project_applied(guard, changes)
        for name in changes.keys() & self._masters.keys():
            protection.get_local(name).copy_(self._masters[name])
        protection.fingerprints |= protection.fingerprint(self._lent)

    @contextmanager
    def projected(self) -> Iterator[None]:
        """The weights as :meth:`flush` would leave them, for an evaluation in the middle of ``every`` steps.

        Training goes on from what they were, so that it does not depend on when one evaluates. Nothing may be built on
        the weights in between: a step of an attached optimizer, an update of the memory, loading it or this handle, and
        :meth:`detach` are refused.
        """
        pending = list(self._pending)
        names = _names(pending)
        self._protection.reshard()
        weights = {name: self._protection.get_local(name).clone() for name in names}
        kept = {name: self._kept[name].clone() for name in names}
        masters = {name: master.clone() for name, master in self._masters.items()}
        lent = {name: self._protection.fingerprints[name] for name in self._lent if pending}
        self.flush()
        was_inside, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = was_inside
            self._protection.reshard()
            with torch.no_grad():
                for name, weight in weights.items():
                    self._protection.get_local(name).copy_(weight)
            self._kept |= kept
            self._masters = masters
            self._protection.fingerprints |= lent
            self._await(pending)

    def state_dict(self) -> dict[str, Any]:
        """What a step needs beside model, optimizer and memory: the float32 masters of 16-bit weights, and the count.

        Like every state dict, this projects what is still to be projected first, so nothing is pending in it. Where the
        model is sharded, the masters are those of this process's shards: every process saves and loads its own.
        """
        self.flush()
        return {"steps": self.steps, "masters": dict(self._masters)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state_dict`; what was still to be projected is dropped with the weights it was of."""
        self._refuse_inside("load_state_dict() would be undone at its end")
        self._await([])
        self.steps = state["steps"]
        # A file's tensors need not be where the weights are.
        device = {name: self._protection.get_local(name).device for name in state["masters"]}
        self._masters = {name: master.to(device[name], copy=True) for name, master in state["masters"].items()}

    def _refuse_inside(self, what: str) -> None:
        """Raise if the weights are put back soon, and what is to be done with it."""
        if self._is_inside:
            raise RuntimeError(f"inside handle.projected(), {what}: leave the with block first")

    def _await(self, pending: list[Guard]) -> None:
        """These guards, and no others, have a change that is still to be projected."""
        self._pending = pending
        if pending:
            self._protection.unfinished[self] = None
        else:
            self._protection.unfinished.pop(self, None)

    def refresh(self, *, grown: bool) -> None:
        """Take note of new subspaces (``grown``) or a new optimizer: momentum, linear layers on trial."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        self._taken.clear()
        self._projected.clear()
        groups = _groups(optimizer)
        for guard in self._guards(groups):
            road, self.reason[guard.name] = self._road_of(guard, optimizer, groups, closure=False)
            linear = road == "gradient"
            if linear and self.wanted != "gradient":
                self._protection.watch(guard, self._token, always=self.wanted == "input")
            else:
                self._protection.unwatch(guard, "another road")
            if linear:
                self._project_momentum(optimizer, guard, known=not grown)

    def _guards(self, groups: Mapping[int, object]) -> list[Guard]:
        """Guards with bases whose weight or bias is in one of an optimizer's groups."""
        return [
            g
            for g in self._protection.active()
            if any(id(p) in groups for p in self._protection.tensors(g) if p is not None)
        ]

    def _road_of(
        self, guard: Guard, optimizer: Optimizer, groups: Mapping[int, Mapping[str, Any]], *, closure: bool
    ) -> tuple[str, str]:
        """``applied``, or ``gradient`` where that is exact or was asked for; and why."""
        if self.wanted in ("applied", "gradient"):
            return self.wanted, "asked for"
        if self.every > 1:
            return "applied", f"the change of {self.every} steps is projected at once"
        why = self._why_not_gradient(guard, optimizer, groups, closure=closure)
        if why:
            return "applied", why
        is_sharded = (
            guard.layer_type.is_linear and find_local_rows(self._protection.parameter(guard.weight)) is not None
        )
        return "gradient", "the input side needs the whole gradient, and the weight is sharded" if is_sharded else ""

    def _why_not_gradient(
        self, guard: Guard, optimizer: Optimizer, groups: Mapping[int, Mapping[str, Any]], *, closure: bool
    ) -> str:
        """Why projecting the gradient would not be exact; empty if it is."""
        if type(optimizer) is not SGD:
            return f"{type(optimizer).__name__} is not linear in the gradient"
        if closure:
            return "the step has a closure"
        if next(reversed(optimizer._optimizer_step_pre_hooks), None) != self._hooks[0].id:
            return "another hook runs between the memory's and the step"
        weight, bias = self._protection.tensors(guard)
        if id(weight) not in groups or (bias is not None and id(bias) not in groups):
            return "weight and bias are in different optimizers"
        own = groups[id(weight)]
        if own["weight_decay"] != 0:
            return "weight decay"
        if bias is not None:
            other = groups[id(bias)]
            keys = ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize")
            if any(own[key] != other[key] for key in keys):
                return "weight and bias have different settings"
        if weight.dtype not in (torch.float32, torch.float64):
            return f"{weight.dtype} weights need a master copy"
        if weight.grad is not None and weight.grad.is_sparse:
            return "a sparse gradient"
        return ""

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        protection = self._protection
        refuse_inside(protection, "a step would be undone at its end")
        # Weights are kept once for all steps that are projected together. A single step that has failed left its own.
        kept = _names(self._pending) if self.every > 1 else set()
        self._restore = []
        if protection.tasks == 0:
            return
        protection.reshard()
        groups = _groups(optimizer)
        guards = self._guards(groups)
        # A layer that has left the optimizer in the middle of ``every`` steps still has a change to be projected.
        stepped = {guard.name for guard in guards}
        pending = [guard for guard in self._pending if guard.name not in stepped] if self.every > 1 else []
        names = _names([*guards, *pending])
        for other in list(protection.unfinished):  # what it has to project must not be taken together with this step
            if other is not self and not names.isdisjoint(_names(other._pending)):
                other.flush()
        protection.trained.update(name for name in names if id(protection.parameter(name)) in groups)
        # A bias of another optimizer changes with its weight; that is no training that nobody projected.
        self._lent = [name for name in sorted(names - protection.trained) if not protection.has_changed(name)]
        # torch passes the optimizer itself as the first positional argument.
        given = [a for a in args if a is not optimizer]
        closure = (given[0] if given else kwargs.get("closure")) is not None
        for guard in guards:
            weight, bias = protection.tensors(guard)
            road, self.reason[guard.name] = self._road_of(guard, optimizer, groups, closure=closure)
            side = protection.sides.get(guard.name)
            if road == "gradient" and guard.name not in self._projected:
                # Momentum has taken in gradients as they were; from here on it must hold projected ones.
                self._project_momentum(optimizer, guard, known=False)
            if road == "applied":
                self._projected.discard(guard.name)
                if side is not None:
                    protection.unwatch(guard, self.reason[guard.name])
                pending.append(guard)
            elif side is not None and side.mode != "off" and side.settle(weight, bias):
                road = "input"
            else:
                _project_gradient(*protection.part(guard), weight, bias)
            if side is not None and side.mode != "trial" and road != "applied":
                protection.proved[guard.name] = side.mode == "replace"
                self.reason[guard.name] = side.why
            self._taken[guard.name] = road
        frozen = {name: protection.find(name) for name in protection.layout.frozen}
        self._restore = [n for n, p in frozen.items() if p is not None and p.requires_grad and id(p) in groups]
        self._warn_of_held(protection.layout.frozen)
        self._await(pending)
        for name in {*self._restore, *_names(pending)} - kept:
            self._keep(name, protection.get_local(name))

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        protection = self._protection
        self.steps += 1
        if protection.tasks == 0:
            return
        if self.steps % self.every == 0:
            self.flush()
        for name in self._restore:
            protection.get_local(name).copy_(self._kept[name])
        protection.statistics.restore()

    def _warn_of_held(self, frozen: dict[str, str]) -> None:
        """A layer that older tasks use has no bases if it was not trained then: say that it is held where it is."""
        names = [name for name in self._restore if frozen[name] == NOT_TRAINED and name not in self._warned]
        if names:
            self._warned.update(names)
            warnings.warn(
                f"{', '.join(names)} had requires_grad=False at the last update, so nothing is known of what older "
                "tasks need there: kept as it is until the next update",
                stacklevel=4,
            )

    def _keep(self, name: str, parameter: Tensor) -> None:
        kept = self._kept.get(name)
        if (
            kept is None
            or kept.shape != parameter.shape
            or kept.dtype != parameter.dtype
            or kept.device != parameter.device
        ):
            self._kept[name] = parameter.clone(memory_format=torch.preserve_format)
        else:
            kept.copy_(parameter)
        if parameter.dtype not in (torch.float16, torch.bfloat16):
            self._masters.pop(name, None)
        elif name not in self._restore:
            master = self._masters.get(name)
            # Whoever wrote to the weight since the last step is right.
            if master is None or not torch.equal(master.to(parameter.dtype), parameter):
                self._masters[name] = parameter.float()

    def _put_back_tokens(self, guard: Guard) -> None:
        """Vectors of fully blocked tokens, to the bit: to subtract their change would leave its rounding."""
        if guard.layer_type.is_lookup:
            _, subspace = self._protection.part(guard)
            assert isinstance(subspace, TokenSubspace)
            rows, kept = subspace.fixed, self._kept[guard.weight]
            self._protection.get_local(guard.weight).index_copy_(0, rows, kept.index_select(0, rows))

    def _change(self, name: str) -> Tensor:
        """What the optimizer did to a parameter; the buffer of what was kept is reused."""
        parameter, kept = self._protection.get_local(name), self._kept[name]
        is_whole = find_local_rows(self._protection.parameter(name)) is None
        if is_whole and len(kept) < len(parameter):  # a vocabulary has grown since; no step has changed its new rows
            grown = parameter[len(kept) :]
            if name in self._masters:
                self._masters[name] = torch.cat([self._masters[name], grown.float()])
            kept = self._kept[name] = torch.cat([kept, grown])
        if name in self._masters:
            change = parameter.float() - kept.float()
            self._masters[name] += change
            return change
        return torch.sub(parameter, kept, out=kept)

    def _project_applied(self, guard: Guard, changes: dict[str, Tensor]) -> None:
        """Take back what the step did inside the guarded subspace."""
        protection = self._protection
        block, subspace = protection.part(guard)
        weight = self._masters.get(guard.weight, protection.get_local(guard.weight))
        bias = None if guard.bias is None else self._masters.get(guard.bias, protection.get_local(guard.bias))
        change = changes[guard.weight]
        bias_change = None if guard.bias is None else block.view_bias(changes[guard.bias])
        source = block.view_matrix(change)
        target = block.view_matrix(weight)
        target_bias = None if bias is None else block.view_bias(bias)
        subspace.subtract_projection_(source, bias_change, target, target_bias)
        if not _shares_storage(target, weight):
            block.write_matrix(weight, target)
        if bias is not None and target_bias is not None and not _shares_storage(target_bias, bias):
            block.write_bias(bias, target_bias)
        if guard.weight in protection.layout.two_sided:  # the other side projects what this one has left
            subspace.subtract_projection_(source, None, source, None)
            if not _shares_storage(source, change):
                block.write_matrix(change, source)

    def _project_momentum(self, optimizer: Optimizer, guard: Guard, *, known: bool) -> None:
        """Momentum from before the subspace grew, or from another road, points into it.

        Args:
            optimizer: has it.
            guard: whose weight and bias it is.
            known: it may be of a run that is taken up again; what has been projected already is left alone then.
        """
        self._projected.add(guard.name)
        parameters = [p for p in self._protection.tensors(guard) if p is not None]
        buffers = [optimizer.state.get(p, {}).get("momentum_buffer") for p in parameters]
        if all(buffer is None for buffer in buffers):
            return
        for i, parameter in enumerate(parameters):  # a joint change has both parts, though one may be zero before
            if buffers[i] is None:
                buffers[i] = optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        block, subspace = self._protection.part(guard)
        here = [get_local(buffer) for buffer in buffers]
        if known and _blocked_share(block, subspace, *here) <= PROJECTED:
            return
        project(block, subspace, *here)


class _Flush:
    """Before a state dict is taken or loaded. A copy of the model, or a file of it, has one that does nothing."""

    def __init__(self, protection: Protection | None = None) -> None:
        self._protection = weakref.ref(protection) if protection is not None else None

    def __call__(self, *_: object) -> None:
        protection = self._protection() if self._protection is not None else None
        if protection is not None:
            protection.flush()

    def __reduce__(self) -> tuple[type[_Flush], tuple[()]]:
        return _Flush, ()


def _names(guards: Iterable[Guard]) -> set[str]:
    """Of the parameters that guards hold."""
    return {name for guard in guards for name in guard.parameters}


def _groups(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """The group of each parameter, by id, as of now: groups may be added at any time."""
    return {id(p): group for group in optimizer.param_groups for p in group["params"]}


def _blocked_share(block: Block, subspace: Blocking, weight: Tensor, bias: Tensor | None = None) -> float:
    """The share of what has the shape of a block's weight and bias that lies along fully blocked bases."""
    dtype = subspace.importance.dtype
    vector = None if bias is None else block.view_bias(bias).to(dtype)
    return subspace.compute_blocked_share(block.view_matrix(weight).to(dtype), vector)


def _release(protection: weakref.ref[Protection], token: object) -> None:
    alive = protection()
    if alive is not None:
        alive.release(token)


def refuse_inside(protection: Protection, what: str) -> None:
    """Raise if any handle of a memory has its weights projected for an evaluation only."""
    for handle in protection.handles():
        handle._refuse_inside(what)


def warn_if_inexact(optimizer: Optimizer, road: Road) -> None:
    """Say what a road that was asked for does not guarantee; refuse one that cannot be taken."""
    plain = type(optimizer) is SGD and all(group["weight_decay"] == 0 for group in optimizer.param_groups)
    if road == "input" and not plain:
        raise ValueError(
            f"road='input' needs torch.optim.SGD without weight decay, not {type(optimizer).__name__}: use road='auto'"
        )
    if road == "gradient" and not plain:
        warnings.warn(
            f"road='gradient' with {type(optimizer).__name__}: the optimizer changes a projected gradient, "
            "so old tasks are forgotten (the paper's Adam failure). road='auto' projects what it applies",
            stacklevel=3,
        )


def _project_gradient(block: Block, subspace: Blocking, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
    """Eq. 3 on the gradients of a block, in place."""
    if weight.grad is None and (bias is None or bias.grad is None):
        return
    for parameter in (weight, bias):  # a joint change has both parts, though one may be zero before
        if parameter is not None and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    assert weight.grad is not None
    project(
        block, subspace, get_local(weight.grad), None if bias is None or bias.grad is None else get_local(bias.grad)
    )


def project(block: Block, subspace: Blocking, weight: Tensor, bias: Tensor | None = None) -> None:
    """Eq. 3 in place on what has the shape of a block's weight and bias, whatever its type and strides."""
    dtype = subspace.importance.dtype
    matrix = block.view_matrix(weight).to(dtype)
    vector = None if bias is None else block.view_bias(bias).to(dtype)
    subspace.subtract_projection_(matrix, vector, matrix, vector)
    if not _shares_storage(matrix, weight):
        block.write_matrix(weight, matrix)
    if bias is not None and vector is not None and not _shares_storage(vector, bias):
        block.write_bias(bias, vector)


def _shares_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
