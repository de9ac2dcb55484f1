"""The input mode: project a linear layer's batch inputs instead of its weight gradient.

The weight gradient of a linear layer is D^T X, and (D^T X)(I - M L M^T) = D^T (X - (X M) L M^T): projecting the n rows
of X gives the same result as projecting the gradient, at n/out of the cost. While the layer's forward runs, the input
that autograd saves for the weight gradient is replaced by its projection; the layer, its output and its input gradient
do not change.

This is correct only if the whole gradient comes from inputs that were replaced. A weight may also be used functionally,
be tied, or be part of a penalty; the saved tensor may be a copy (autocast, a non-contiguous input). So every step is
verified: for a random vector v, G v must equal the sum of D^T (X v) over the watched backward passes. A gradient with
any other contribution fails this proof, and is then projected in full.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from sgp.projection.layer import ProtectedLayer
from sgp.projection.modes import ProjectionMode, project_gradients
from sgp.projection.precision import is_reduced_precision
from sgp.projection.sharded import find_local_rows
from sgp.projection.subspace import Subspace

# In float32 the two sides of the proof differ by rounding of about 1e-6 of their size.
PROOF_TOLERANCE = 1e-5
# Multiply-adds of a projection below which watching a layer costs more than it saves.
WORTH_WATCHING = 10_000_000
NOT_FROM_INPUTS = "its gradient does not come from its inputs alone"

# Running forward passes by module. Separate from the watches, which may end in the middle of a forward pass.
_open: dict[int, list[tuple[_Call, saved_tensors_hooks] | None]] = {}
# Watched modules are registered here and not on the modules, so that a copy or a file of the model has no trace of it.
_watched: WeakKeyDictionary[nn.Module, InputWatch] = WeakKeyDictionary()
_hooks: list[RemovableHandle] = []


class InputMode(ProjectionMode):
    """Project layers through their inputs where that is proven correct, and their gradients otherwise.

    Args:
        watches: Linear layers with their watches.
        reasons: Dict that receives, by layer name, why a layer is not projected through its inputs.

    Attributes:
        taken: Mode in which each layer was projected at the last step.
    """

    acts_after_step = False

    def __init__(self, watches: Mapping[ProtectedLayer, InputWatch], reasons: dict[str, str]) -> None:
        self._watches = watches
        self._reasons = reasons
        self.taken: dict[ProtectedLayer, Literal["input", "gradient"]] = dict.fromkeys(watches, "gradient")

    def before_step(self) -> None:
        proofs = [watch.prove(layer) for layer, watch in self._watches.items() if watch.is_open]
        # The proofs of all layers are read in one synchronization with the device.
        results = [holds.to(proofs[0][0].device) for holds, _ in proofs]
        holds = iter(torch.stack(results).tolist() if results else [])
        factors = iter([factor for _, factor in proofs])
        for layer, watch in self._watches.items():
            is_projected = watch.is_open and watch.conclude(layer, next(holds), next(factors))
            self.taken[layer] = "input" if is_projected else "gradient"
            if watch.state != "trial":
                layer.is_input_proven = watch.state == "replace"
                self._reasons[layer.name] = watch.reason
        project_gradients([layer for layer, mode in self.taken.items() if mode == "gradient"])


class InputWatch:
    """Watch the inputs of one linear layer, and replace them by their projections once that is proven correct.

    The first step is a trial: inputs are only watched, and the gradient is projected in full. If the proof holds and
    there are at most half as many rows as outputs, inputs are replaced from then on. The first proof that fails ends
    the watch.

    Args:
        layer: Layer for which :func:`can_watch` is true.

    Attributes:
        state: ``"trial"``, ``"replace"`` or ``"off"``.
        reason: Why the watch was closed.
    """

    def __init__(self, layer: ProtectedLayer) -> None:
        weight, subspace = layer.weight.tensor, layer.get_bases()
        assert isinstance(subspace, Subspace)
        self.state: Literal["trial", "replace", "off"] = "replace" if layer.is_input_proven else "trial"
        self.reason = ""
        self.subspace = subspace
        self.has_bias = layer.bias is not None
        generator = torch.Generator("cpu").manual_seed(0)  # does not change the user's random state
        probe = torch.randn(weight.shape[1], generator=generator, dtype=torch.float32, device="cpu")
        self.probe = probe.to(weight.device, weight.dtype)
        self._weight = weight
        self._reset()
        module = layer.weight.owner
        if module in _watched:
            _watched[module].close("another optimizer watches the layer")
        _watched[module] = self
        if not _hooks:
            _hooks.append(register_module_forward_pre_hook(_before_forward))
            _hooks.append(register_module_forward_hook(_after_forward, always_call=True))

    def _reset(self) -> None:
        """Reset the sums over backward passes: of D^T (X v), of D, and of the correction of the bias."""
        self._expected = self._column_sum = self.probe.new_zeros(self._weight.shape[0])
        self._bias_correction: Tensor | None = None
        self._replaced: set[bool] = set()
        self._rows = 0
        self._task = -1  # the last backward pass

    @property
    def is_open(self) -> bool:
        """Whether inputs are watched or replaced."""
        return self.state != "off"

    def close(self, reason: str) -> None:
        """Stop watching."""
        self.state, self.reason = "off", reason
        for module in [module for module, watch in _watched.items() if watch is self]:
            del _watched[module]
        _remove_hooks_if_idle()

    def prove(self, layer: ProtectedLayer) -> tuple[Tensor, Tensor]:
        """Compare the gradient with the watched backward passes, on the device.

        Args:
            layer: Layer that is watched.

        Returns:
            Whether the gradient is a multiple of the sum over these passes, and the factor (1, or that of clipping).
            Both are tensors without dimensions.
        """
        gradient, expected = layer.weight.tensor.grad, self._expected
        bias_gradient = None if layer.bias is None else layer.bias.tensor.grad
        is_bias_missing = layer.bias is not None and bias_gradient is None
        if gradient is None or not self._replaced or gradient.dtype != self.probe.dtype or is_bias_missing:
            return expected.new_zeros((), dtype=torch.bool), expected.new_zeros(())
        found = gradient @ self.probe
        factor = (found @ expected) / (expected @ expected).clamp(min=torch.finfo(torch.float32).tiny)
        holds = _is_close(found, factor * expected)
        if bias_gradient is not None:
            holds &= _is_close(bias_gradient, factor * self._column_sum)
        return holds, factor

    def conclude(self, layer: ProtectedLayer, holds: bool, factor: Tensor) -> bool:
        """Act on the result of a proof, before the optimizer's step.

        Args:
            layer: Layer that is watched.
            holds: Whether the proof holds.
            factor: Factor between the gradient and the sum over the watched passes.

        Returns:
            Whether the gradient is projected already. If not, it must be projected now.
        """
        replaced, rows, correction = self._replaced, self._rows, self._bias_correction
        self._reset()
        if self.state == "trial":
            if not holds:
                self.close(NOT_FROM_INPUTS)
            elif 2 * rows > layer.weight.tensor.shape[0]:
                self.close("a batch has more rows than the gradient")
            elif rows:
                self.state = "replace"
            return False
        if holds and replaced == {True}:
            if layer.bias is not None and layer.bias.tensor.grad is not None and correction is not None:
                # The gradient of a bias has no saved input that could be replaced: its projection is subtracted here.
                layer.bias.tensor.grad.sub_(factor * correction)
            return True
        if replaced != {False}:  # if all passes began before inputs were replaced, the proof says nothing
            self.close(NOT_FROM_INPUTS)
        return False

    def enter(self, module: nn.Module, input: Tensor) -> None:
        """Start watching a forward pass of the layer."""
        opened: tuple[_Call, saved_tensors_hooks] | None = None
        # These hooks would hide those of others (checkpointing, offloading).
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
            with suppress(RuntimeError):  # torch.func has tensors without storage, and forbids such hooks
                call = _Call(self, input)
                context = saved_tensors_hooks(call.pack, _unpack)
                context.__enter__()
                opened = call, context
        _open.setdefault(id(module), []).append(opened)

    def receive(self, D: Tensor, call: _Call) -> None:
        """Add a backward pass: D is the gradient of the layer's output, [n, out]."""
        task = torch._C._current_graph_task_id()
        if self._weight.grad is None and task != self._task:
            self._reset()  # zero_grad has discarded earlier passes
        self._task = task
        assert call.probed is not None
        self._expected = self._expected + D.mT @ call.probed
        if self.has_bias:
            self._column_sum = self._column_sum + D.sum(0)
            if call.constant_removed is not None:
                removed = D.mT @ call.constant_removed
                self._bias_correction = removed if self._bias_correction is None else self._bias_correction + removed
        self._replaced.add(call.is_replaced)
        self._rows += D.shape[0]


def can_watch(layer: ProtectedLayer, *, always: bool) -> bool:
    """Return whether a layer's inputs can be watched and, unless ``always``, whether that may save time."""
    if not layer.layer_type.is_linear or len(layer.sources) != 1 or layer.is_input_proven is False:
        return False
    weight = layer.weight.tensor
    if find_local_rows(weight) is not None or layer.subspace is None:
        return False
    return always or weight.numel() * layer.subspace.width > WORTH_WATCHING


def _is_close(a: Tensor, b: Tensor) -> Tensor:
    close: Tensor = (a - b).norm() <= PROOF_TOLERANCE * a.norm()
    return close


class _Call:
    """One forward pass of a watched layer.

    Attributes:
        is_replaced: Whether the saved input was replaced by its projection.
        probed: X v, or X' v if X was replaced by X'; None if the layer's input was not saved.
        constant_removed: Part of the constant input that the projection removes from each row.
    """

    def __init__(self, watch: InputWatch, input: Tensor) -> None:
        self.is_replaced = False
        self.probed: Tensor | None = None
        self.constant_removed: Tensor | None = None
        self._watch = watch
        self._pointer = input.data_ptr()
        self._numel = input.numel()
        self._dtype = input.dtype

    def pack(self, tensor: Tensor) -> Tensor:
        """Return the tensor that autograd saves: the projection of the layer's input, and any other tensor as it is."""
        watch = self._watch
        is_input = (
            self.probed is None
            and tensor.data_ptr() == self._pointer
            and tensor.numel() == self._numel
            and tensor.dtype == self._dtype == watch.probe.dtype
            and tensor.device == watch.probe.device  # a model may have been moved
            and tensor.is_contiguous()
        )
        if not is_input:
            return tensor
        with torch.no_grad():
            rows = tensor.detach().reshape(-1, watch.probe.shape[0])
            if watch.state != "replace":
                self.probed = rows @ watch.probe
                return tensor
            projected = rows.clone().unsqueeze(0)
            ones = projected.new_ones(1, rows.shape[0]) if watch.has_bias else None
            watch.subspace.subtract_projection_(rows.unsqueeze(0), ones, projected, ones)
            if ones is not None:
                self.constant_removed = 1 - ones[0]
            self.probed = projected[0] @ watch.probe
            self.is_replaced = True
            return projected.view(tensor.shape)

    def backward(self, gradients: tuple[Tensor, ...]) -> None:
        """Receive the gradient of the layer's output, before the layer's own backward."""
        D = gradients[0]
        if D is not None:
            self._watch.receive(D.detach().reshape(-1, D.shape[-1]), self)


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def _before_forward(module: nn.Module, args: tuple[Any, ...]) -> None:
    if torch.compiler.is_compiling():
        return
    watch = _watched.get(module)
    if watch is None or not torch.is_grad_enabled() or not args or not isinstance(args[0], Tensor):
        return
    if not is_reduced_precision(args[0].device):  # the proof would fail by rounding
        watch.enter(module, args[0])


def _after_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Stop watching a forward pass that has returned or raised."""
    if torch.compiler.is_compiling() or id(module) not in _open:
        return
    opened = _open[id(module)].pop()
    if not _open[id(module)]:
        del _open[id(module)]
    if opened is not None:
        call, context = opened
        context.__exit__()
        if call.probed is not None and isinstance(output, Tensor) and output.grad_fn is not None:
            output.grad_fn.register_prehook(call.backward)
    _remove_hooks_if_idle()


def _remove_hooks_if_idle() -> None:
    if not _watched and not _open:
        while _hooks:
            _hooks.pop().remove()
