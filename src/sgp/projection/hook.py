"""Hook on ``optimizer.step()`` that chooses a projection mode for each layer and runs it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from sgp.projection.caller_warning import warn_caller
from sgp.projection.input_mode import InputMode, InputWatch, can_watch
from sgp.projection.layer import HALF_PRECISION, ProtectedLayer, ProtectedParameter, iterate_parameters
from sgp.projection.modes import FrozenMode, GradientMode, Mode, ProjectionMode, StepMode, project_momentum
from sgp.projection.precision import full_precision
from sgp.projection.protected_model import ProtectedModel
from sgp.projection.scan import NOT_TRAINED
from sgp.projection.sharded import find_local_rows

# Share along blocked directions below which a momentum buffer counts as projected.
PROJECTED = 1e-4
# Settings of SGD that must be equal for a weight and its bias to have a joint linear step.
LINEAR_SETTINGS = ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize")

# Facts that the buffers of a mode depend on, in addition to a tensor's identity.
get_tensor_facts = attrgetter("dtype", "device", "shape", "requires_grad")

Group = Mapping[str, Any]


@dataclass
class StepPlan:
    """The projection of an optimizer's steps, as long as certain facts do not change.

    Attributes:
        facts: Facts that the plan depends on (see :meth:`OptimizerHook._collect_facts`).
        modes: Projection modes to run before and after a step.
        chosen: Name of the projection mode of each layer.
        inputs: The input mode, which chooses between inputs and gradient at each step; None if no layer has it.
        tensors: Parameters that ``facts`` identifies, kept alive so that no other tensor gets their identity.
    """

    facts: object
    modes: list[ProjectionMode] = field(default_factory=list)
    chosen: dict[ProtectedLayer, str] = field(default_factory=dict)
    inputs: InputMode | None = None
    tensors: list[Tensor | None] = field(default_factory=list)


class OptimizerHook:
    """Hook that projects the steps of an optimizer, returned by :meth:`GradientMemory.attach`.

    It is active until :meth:`detach`, or until the optimizer is deleted.

    Args:
        protected: State that is shared with the memory.
        optimizer: Optimizer whose steps are projected.
        mode: Requested projection mode.
        every: Number of steps whose change is projected at once.

    Attributes:
        steps: Number of steps that the optimizer has taken since it was attached.
        reasons: By layer, why its last step was not projected in a cheaper mode.
    """

    def __init__(self, protected: ProtectedModel, optimizer: Optimizer, mode: Mode, every: int = 1) -> None:
        self.mode = mode
        self.every = every
        self.steps = 0
        self.reasons: dict[str, str] = {}
        self._protected = protected
        self._optimizer = weakref.ref(optimizer)
        self._plan: StepPlan | None = None
        self._running: Sequence[ProjectionMode] = ()
        self._frames: list[FrameType] = []  # frames of the running steps, outermost first
        self._watches: dict[ProtectedLayer, InputWatch] = {}
        self._projected_momentum: set[ProtectedLayer] = set()
        self._warned: set[str] = set()
        protected.norm_statistics.users.add(self)
        # If the optimizer is deleted without detaching, inputs must no longer be replaced.
        weakref.finalize(optimizer, self.release)
        self._handles = [
            # Dynamo would trace the hooks and recompile after each change of the plan.
            optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step)),  # type: ignore[no-untyped-call]
            optimizer.register_step_post_hook(torch.compiler.disable(self._after_step)),  # type: ignore[no-untyped-call]
            # A loaded momentum may not have been projected.
            optimizer.register_load_state_dict_post_hook(lambda _: self.refresh(has_grown=False)),
        ]
        if every > 1:
            flush = FlushPending(protected)
            self._handles.append(optimizer.register_state_dict_pre_hook(flush))
            for module in protected.model.modules():  # users also save submodules
                self._handles.append(module.register_state_dict_pre_hook(flush))  # type: ignore[no-untyped-call]
                # A change of weights by loading is not a change by steps.
                self._handles.append(module.register_load_state_dict_pre_hook(flush))  # type: ignore[no-untyped-call]
        self.refresh(has_grown=False)

    def __repr__(self) -> str:
        optimizer = self._optimizer()
        name = "none" if optimizer is None else type(optimizer).__name__
        state = "attached" if self.is_attached else "detached"
        return f"OptimizerHook(optimizer={name}, mode={self.mode!r}, every={self.every}, steps={self.steps}, {state})"

    @property
    def is_attached(self) -> bool:
        """Whether steps of the optimizer are projected."""
        return bool(self._handles) and self._optimizer() is not None

    @property
    def modes(self) -> dict[str, str]:
        """Projection mode of each layer at its last step; before the first step, the mode that it will have."""
        optimizer, plan = self._optimizer(), self._plan
        if plan is None and optimizer is not None:
            plan = self._make_plan(optimizer, has_closure=False, facts=None)
            taken = {layer: "input" for layer, watch in self._watches.items() if watch.state == "replace"}
        else:
            taken = dict(plan.inputs.taken) if plan is not None and plan.inputs is not None else {}
        chosen = {} if plan is None else plan.chosen
        return {layer.name: taken.get(layer, mode) if mode == "gradient" else mode for layer, mode in chosen.items()}

    def is_of(self, optimizer: Optimizer) -> bool:
        """Return whether this hook is attached to an optimizer."""
        return self.is_attached and self._optimizer() is optimizer

    def detach(self) -> None:
        """Restore the optimizer as it was before :meth:`GradientMemory.attach`, and free the buffers."""
        self._protected.check_not_temporary("detach() would leave the weights as they were before, unprojected")
        self.flush()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.release()
        for layer in self._protected.layers.values():
            for parameter in layer.parameters:
                parameter.kept = parameter.master = None

    def release(self) -> None:
        """Stop watching inputs and restoring norm statistics."""
        self._close_watches("its optimizer is gone")
        self._plan, self._running = None, ()
        self._protected.norm_statistics.users.discard(self)

    def flush(self) -> None:
        """Project the change of all steps since the last projection."""
        if self._plan is not None:
            self._protected.reshard()
            with full_precision(self._protected.device):
                for mode in self._plan.modes:
                    mode.flush()

    @contextmanager
    def projected(self) -> Iterator[None]:
        """Run the body with the weights that :meth:`flush` would leave, to evaluate in the middle of ``every`` steps.

        Training then continues from the original weights, so it does not depend on when they are evaluated. Inside the
        context, a step of an attached optimizer, an update of the memory, loading the memory or this hook, and
        :meth:`detach` are errors.

        Yields:
            Nothing.
        """
        protected = self._protected
        protected.reshard()
        with ExitStack() as stack:
            with full_precision(protected.device):
                for mode in () if self._plan is None else self._plan.modes:
                    stack.enter_context(mode.projected())
            was_temporary, protected.is_temporary = protected.is_temporary, True
            try:
                yield
            finally:
                protected.is_temporary = was_temporary
                protected.reshard()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that model, optimizer and memory do not have: the step count and masters of 16-bit weights.

        Like every state dict, this projects a pending change first. If the model is sharded, the masters belong to the
        shards of this process: every process saves and loads its own.
        """
        self.flush()
        masters = {p.name: p.master for layer in self._protected.layers.values() for p in layer.parameters}
        return {"steps": self.steps, "masters": {name: m for name, m in masters.items() if m is not None}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict`. A pending change is discarded."""
        self._protected.check_not_temporary("load_state_dict() would be undone at its end")
        if self._plan is not None:
            for mode in self._plan.modes:
                mode.discard()
        self.steps = state["steps"]
        for parameter in self._protected.scan.parameters.values():
            master = state["masters"].get(parameter.name)
            # The tensors of a file may be on another device than the weights.
            parameter.master = None if master is None else master.to(parameter.local.device, copy=True)

    def refresh(self, *, has_grown: bool) -> None:
        """Adapt to new subspaces or a new state of the optimizer: project momentum, and watch linear layers.

        Args:
            has_grown: Whether subspaces have grown, so that earlier momentum has components in them.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return
        self._close_watches("the memory was updated")
        self._projected_momentum.clear()
        self._drop_plan()
        plan = self._make_plan(optimizer, has_closure=False, facts=None)
        for layer in [layer for layer, mode in plan.chosen.items() if mode == "gradient"]:
            if self.mode != "gradient" and can_watch(layer, always=self.mode == "input"):
                self._watches[layer] = InputWatch(layer)
            with full_precision(self._protected.device):
                self._project_momentum(optimizer, layer, tolerance=0.0 if has_grown else PROJECTED)

    def _close_watches(self, reason: str) -> None:
        for watch in self._watches.values():
            watch.close(reason)
        self._watches.clear()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        protected = self._protected
        protected.check_not_temporary("a step would be undone at its end")
        if self._enter_step() or protected.tasks == 0:
            return
        # PyTorch passes the optimizer as the first positional argument.
        given = [argument for argument in args if argument is not optimizer]
        has_closure = (given[0] if given else kwargs.get("closure")) is not None
        protected.reshard()
        with torch.no_grad(), full_precision(protected.device):
            modes = self._update_plan(optimizer, has_closure).modes
            for mode in modes:
                mode.before_step()
        self._running = [mode for mode in modes if mode.acts_after_step]

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._leave_step():
            return
        self.steps += 1
        protected = self._protected
        if protected.tasks == 0:
            return
        running, self._running = self._running, ()
        if running:
            is_due = self.steps % self.every == 0
            with torch.no_grad(), full_precision(protected.device):
                for mode in running:
                    mode.after_step()
                    if is_due:
                        mode.flush()
        protected.norm_statistics.restore()

    def _enter_step(self) -> bool:
        """Return whether a step that starts runs inside another one, as by ``super().step()``.

        No hook runs when a step raises, so running steps cannot be counted. Each step is identified by its frame
        instead, and runs as long as the frame is on the stack.
        """
        self._drop_ended_steps()
        self._frames.append(next(_iterate_callers()))
        return len(self._frames) > 1

    def _leave_step(self) -> bool:
        """Return whether a step that ends runs inside another one."""
        self._drop_ended_steps()
        is_nested = len(self._frames) > 1
        del self._frames[-1:]
        return is_nested

    def _drop_ended_steps(self) -> None:
        while self._frames and self._frames[-1] not in _iterate_callers():
            del self._frames[-1]

    def _update_plan(self, optimizer: Optimizer, has_closure: bool) -> StepPlan:
        """Return the plan for a step; it is rebuilt if the facts of the current plan have changed."""
        facts = self._collect_facts(optimizer, has_closure)
        if self._plan is None or self._plan.facts != facts:
            self._drop_plan()
            self._protected.bind()
            facts = self._collect_facts(optimizer, has_closure)
            plan = self._plan = self._make_plan(optimizer, has_closure, facts)
            self._fill_plan(plan, optimizer)
        return self._plan

    def _collect_facts(self, optimizer: Optimizer, has_closure: bool) -> object:
        """Return the facts that modes and their buffers depend on: identities and types, but no learning rates."""
        tensors = [parameters.get(leaf) for parameters, leaf in self._protected.places]
        return (
            self._protected.version,
            has_closure,
            next(reversed(optimizer._optimizer_step_pre_hooks), None),
            list(map(id, tensors)),
            [get_tensor_facts(tensor) for tensor in tensors if tensor is not None],
            [list(map(id, group["params"])) for group in optimizer.param_groups],
            _collect_linear_facts(optimizer.param_groups) if type(optimizer) is SGD else (),
            [layer.has_sparse_gradient for layer in self._protected.scan.layers.values() if layer.layer_type.is_lookup],
        )

    def _drop_plan(self) -> None:
        """Drop the plan. A pending change is projected first, unless it is the change of a single step that failed."""
        if self._plan is not None:
            for mode in self._plan.modes:
                mode.flush() if self.every > 1 else mode.discard()
        self._plan = None

    def _make_plan(self, optimizer: Optimizer, has_closure: bool, facts: object) -> StepPlan:
        """Return a plan with a projection mode for each layer that the optimizer changes."""
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        plan = StepPlan(facts)
        for layer in self._protected.layers_with_bases:
            if any(id(parameter.tensor) in groups for parameter in layer.parameters):
                plan.chosen[layer], self.reasons[layer.name] = self._choose_mode(layer, optimizer, groups, has_closure)
        return plan

    def _fill_plan(self, plan: StepPlan, optimizer: Optimizer) -> None:
        """Create the modes of a plan, with their buffers."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        plan.tensors = [p.tensor if p.is_present else None for p in self._protected.scan.parameters.values()]
        for parameter in iterate_parameters(plan.chosen):
            parameter.is_stepped |= id(parameter.tensor) in stepped
        by_step = [layer for layer, mode in plan.chosen.items() if mode == "step"]
        by_gradient = [layer for layer, mode in plan.chosen.items() if mode == "gradient"]
        self._follow_modes(optimizer, by_step, by_gradient)
        watches = {layer: self._watches[layer] for layer in by_gradient if layer in self._watches}
        frozen = self._find_frozen(stepped)
        if frozen:
            plan.modes.append(FrozenMode(frozen))
        if by_step:
            plan.modes.append(StepMode(by_step, stepped, accumulates=self.every > 1))
        if len(watches) < len(by_gradient):
            plan.modes.append(GradientMode([layer for layer in by_gradient if layer not in watches]))
        if watches:
            plan.inputs = InputMode(watches, self.reasons)
            plan.modes.append(plan.inputs)

    def _follow_modes(
        self, optimizer: Optimizer, by_step: Sequence[ProtectedLayer], by_gradient: Sequence[ProtectedLayer]
    ) -> None:
        """Project momentum for the mode ``gradient``, and stop watching inputs of layers in the mode ``step``."""
        for layer in by_gradient:
            if layer not in self._projected_momentum:  # it has accumulated gradients that were not projected
                self._project_momentum(optimizer, layer, tolerance=0.0)
        self._projected_momentum.difference_update(by_step)
        for layer in by_step:
            if layer in self._watches:
                self._watches.pop(layer).close(self.reasons[layer.name])

    def _find_frozen(self, stepped: Container[int]) -> list[ProtectedParameter]:
        """Return the frozen parameters that an optimizer steps.

        Warn about parameters that were not trained at the last update, so their layers have no bases.
        """
        reasons, parameters = self._protected.scan.frozen, self._protected.scan.parameters
        present = [parameters[name] for name in reasons if parameters[name].is_present]
        frozen = [p for p in present if p.tensor.requires_grad and id(p.tensor) in stepped]
        names = [p.name for p in frozen if reasons[p.name] == NOT_TRAINED and p.name not in self._warned]
        if names:
            self._warned.update(names)
            warn_caller(
                f"{', '.join(names)} had requires_grad=False at the last update, so what older tasks need there is "
                "unknown: frozen until the next update"
            )
        return frozen

    def _choose_mode(
        self, layer: ProtectedLayer, optimizer: Optimizer, groups: Mapping[int, Group], has_closure: bool
    ) -> tuple[str, str]:
        """Return the mode of a layer, ``step`` or ``gradient``, and why it is not a cheaper one."""
        if self.mode in ("step", "gradient"):
            return self.mode, "requested"
        if self.every > 1:
            return "step", f"the change of {self.every} steps is projected at once"
        is_last = next(reversed(optimizer._optimizer_step_pre_hooks), None) == self._handles[0].id
        reason = _explain_not_linear(layer, optimizer, groups, has_closure=has_closure, is_last=is_last)
        if reason:
            return "step", reason
        is_sharded = layer.layer_type.is_linear and find_local_rows(layer.weight.tensor) is not None
        return "gradient", "the input mode needs the whole gradient, and the weight is sharded" if is_sharded else ""

    def _project_momentum(self, optimizer: Optimizer, layer: ProtectedLayer, *, tolerance: float) -> None:
        """Project momentum that dates from before the subspace grew, or from another mode."""
        self._projected_momentum.add(layer)
        tensors = [parameter.tensor for parameter in layer.parameters]
        buffers = [optimizer.state.get(tensor, {}).get("momentum_buffer") for tensor in tensors]
        if any(buffer is not None for buffer in buffers):
            with torch.no_grad():
                whole = project_momentum(layer, buffers, tolerance=tolerance)
            for tensor, buffer in zip(tensors, whole, strict=True):
                optimizer.state[tensor]["momentum_buffer"] = buffer


class FlushPending:
    """Hook that projects pending changes before a state dict is saved or loaded.

    In a copy or a file of the model, it does nothing.
    """

    def __init__(self, protected: ProtectedModel | None = None) -> None:
        self._protected = weakref.ref(protected) if protected is not None else None

    def __call__(self, *_: object) -> None:
        protected = self._protected() if self._protected is not None else None
        if protected is not None:
            protected.flush()

    def __reduce__(self) -> tuple[type[FlushPending], tuple[()]]:
        return FlushPending, ()


def check_mode(optimizer: Optimizer, mode: Mode) -> None:
    """Raise if an optimizer does not support a mode, and warn if the mode is not exact for it.

    Raises:
        ValueError: The mode is ``"input"`` and the optimizer is not linear in the gradient.
    """
    is_linear = type(optimizer) is SGD and all(group["weight_decay"] == 0 for group in optimizer.param_groups)
    if mode == "input" and not is_linear:
        raise ValueError(
            f"mode='input' needs torch.optim.SGD without weight decay, not {type(optimizer).__name__}: use mode='auto'"
        )
    if mode == "gradient" and not is_linear:
        warn_caller(
            f"mode='gradient' with {type(optimizer).__name__}: the optimizer changes the projected gradient, so old "
            "tasks are forgotten (as the paper shows for Adam). mode='auto' projects the change that it applies"
        )


def warn_of_masters(parameters: Sequence[nn.Parameter]) -> None:
    """Warn about the memory that float32 masters of 16-bit weights take."""
    half = sum(4 * parameter.numel() for parameter in parameters if parameter.dtype in HALF_PRECISION)
    if half:
        warn_caller(
            "the model has 16-bit weights: the hook keeps float32 masters of the protected ones (up to "
            f"{half / 1e6:.1f} MB), since the rounding of a step would leak"
        )


def _explain_not_linear(
    layer: ProtectedLayer, optimizer: Optimizer, groups: Mapping[int, Group], *, has_closure: bool, is_last: bool
) -> str:
    """Return why projecting a layer's gradient would not be exact; an empty string if it is exact."""
    weight, bias = layer.weight.tensor, None if layer.bias is None else layer.bias.tensor
    if type(optimizer) is not SGD:
        return f"{type(optimizer).__name__} is not linear in the gradient"
    if has_closure:
        return "the step has a closure"
    if not is_last:
        return "another hook runs between the hook of the memory and the step"
    if id(weight) not in groups or (bias is not None and id(bias) not in groups):
        return "weight and bias are in different optimizers"
    if groups[id(weight)]["weight_decay"] != 0:
        return "weight decay"
    if bias is not None and not _are_equal_settings(groups[id(weight)], groups[id(bias)]):
        return "weight and bias have different settings"
    if weight.dtype not in (torch.float32, torch.float64):
        return f"{weight.dtype} weights need a master copy"
    return "a sparse gradient" if layer.has_sparse_gradient else ""


def _are_equal_settings(a: Group, b: Group) -> bool:
    """Return whether two groups of SGD have equal settings.

    Tensors count as equal only if they are one object, since reading them would synchronize with the device.
    """
    if a is b:
        return True
    pairs = [(a[key], b[key]) for key in LINEAR_SETTINGS]
    return all(x is y or (not isinstance(x, Tensor) and not isinstance(y, Tensor) and x == y) for x, y in pairs)


def _collect_linear_facts(groups: Sequence[Group]) -> list[tuple[bool, int]]:
    """Return for each group of SGD whether it has weight decay, and the first group with equal settings."""
    return [
        (bool(g["weight_decay"] != 0), next(i for i, other in enumerate(groups) if _are_equal_settings(other, g)))
        for g in groups
    ]


def _iterate_callers() -> Iterator[FrameType]:
    """Yield the frames that called a hook, innermost first, except those of this module and of Dynamo's wrapper."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and _is_wrapper(frame):
        frame = frame.f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_wrapper(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name == __name__ or name.startswith("torch._dynamo")
