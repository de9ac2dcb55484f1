"""The input mode: project a linear layer's batch inputs instead of its weight gradient.

The weight gradient of a linear layer is D^T X, and (D^T X)(I - M L M^T) = D^T (X - (X M) L M^T): projecting the n rows
of X gives the same result as projecting the gradient, at n/out of the cost. The input that autograd saves for the
weight gradient is replaced by its projection while the layer's forward runs; the layer, its output and its input
gradient are untouched.

That is right only if the whole gradient comes from inputs that were replaced. A weight may also be used functionally,
be tied, or be part of a penalty; the saved tensor may be a copy (autocast, a non-contiguous input). So every step is
verified: for a random vector v, G v must equal the sum of D^T (X v) over the backward passes that were watched. A
gradient with anything else in it fails, and is then projected in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

# The two sides of the proof differ by rounding of about 1e-6 of their size in float32.
PROOF_TOLERANCE = 1e-5
# Multiply-adds of a projection below which watching a layer costs more than it saves.
WORTH_WATCHING = 10_000_000
NOT_FROM_INPUTS = "its gradient does not come from its inputs alone"

# Forward passes that are running, by module. Kept apart from what is watched, which may end in the middle of one.
_open: dict[int, list[tuple[_Call, saved_tensors_hooks] | None]] = {}
# Watched modules are registered here and not on the modules: a copy or a file of the model has no trace of it.
_watched: WeakKeyDictionary[nn.Module, InputWatch] = WeakKeyDictionary()
_hooks: list[RemovableHandle] = []


class InputMode(ProjectionMode):
    """Project layers through their inputs where that is proven right, and their gradients otherwise.

    Args:
        watches: Linear layers with what was seen of their inputs.
        reasons: Where to note why a layer is not projected through its inputs, by layer name.

    Attributes:
        taken: How each layer was projected at the last step.
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
        project_gradients([layer for layer, taken in self.taken.items() if taken == "gradient"])


class InputWatch:
    """Watch the inputs of one linear layer, and replace them by their projections once that is proven right.

    The first step is a trial: inputs are only watched, and the gradient is projected in full. If the proof holds and
    there are at most half as many rows as outputs, inputs are replaced from then on. The first proof that fails ends
    it.

    Args:
        layer: Layer for which :func:`can_watch` is true.

    Attributes:
        state: ``"trial"``, ``"replace"`` or ``"off"``.
        reason: Why it is off.
    """

    def __init__(self, layer: ProtectedLayer) -> None:
        weight, subspace = layer.weight.tensor, layer.get_bases()
        assert isinstance(subspace, Subspace)
        self.state: Literal["trial", "replace", "off"] = "replace" if layer.is_input_proven else "trial"
        self.reason = ""
        self.subspace = subspace
        self.has_bias = layer.bias is not None
        generator = torch.Generator("cpu").manual_seed(0)  # leaves the user's random state alone
        probe = torch.randn(weight.shape[1], generator=generator, dtype=torch.float32, device="cpu")
        self.probe = probe.to(weight.device, weight.dtype)
        self._weight = weight
        self._bias_correction: Tensor | None = None
        self._task = -1  # the backward pass that arrived last
        self._rows = 0
        self._expected = self._column_sum = self.probe.new_zeros(weight.shape[0])
        self._replaced: set[bool] = set()
        module = layer.weight.owner
        other = _watched.get(module)
        if other is not None:
            other.close("another optimizer watches the layer")
        _watched[module] = self
        if not _hooks:
            _hooks.append(register_module_forward_pre_hook(_before_forward))
            _hooks.append(register_module_forward_hook(_after_forward, always_call=True))

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
        """Compare the gradient with what was watched, on the device.

        Returns:
            Whether the gradient is a multiple of what was watched, and the factor (1, or that of clipping). Both are
            tensors without dimensions.
        """
        weight, bias = layer.weight.tensor, None if layer.bias is None else layer.bias.tensor
        expected = self._expected
        is_complete = weight.grad is not None and bool(self._replaced) and weight.grad.dtype == self.probe.dtype
        if not is_complete or (bias is not None and bias.grad is None):
            return expected.new_zeros((), dtype=torch.bool), expected.new_zeros(())
        assert weight.grad is not None
        found = weight.grad @ self.probe
        factor = (found @ expected) / (expected @ expected).clamp(min=torch.finfo(torch.float32).tiny)
        holds = _is_close(found, factor * expected)
        if bias is not None and bias.grad is not None:
            holds &= _is_close(bias.grad, factor * self._column_sum)
        return holds, factor

    def conclude(self, layer: ProtectedLayer, holds: bool, factor: Tensor) -> bool:
        """Act on the proof of a step, before the optimizer takes it.

        Returns:
            Whether the gradient is projected already. If not, it has to be now.
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
                # The gradient of a bias has no saved input to replace; its projection is the same sum over rows.
                layer.bias.tensor.grad.sub_(factor * correction)
            return True
        if replaced != {False}:  # only passes that began before inputs were replaced: nothing is wrong
            self.close(NOT_FROM_INPUTS)
        return False

    def enter(self, module: nn.Module, input: Tensor) -> None:
        """Begin to watch a forward pass of the layer."""
        calls = _open.setdefault(id(module), [])
        # Hooks of others (checkpointing, offloading) would be hidden by ours.
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
            try:
                call = _Call(self, input)
                context = saved_tensors_hooks(call.pack, _unpack)
                context.__enter__()
                calls.append((call, context))
                return
            except RuntimeError:  # torch.func has tensors without storage, and forbids such hooks
                pass
        calls.append(None)

    def arrive(self, D: Tensor, call: _Call) -> None:
        """Add what a backward pass brings: the gradient of the layer's output, [n, out]."""
        task = torch._C._current_graph_task_id()
        if self._weight.grad is None and task != self._task:
            self._reset()  # zero_grad discarded what came before
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

    def _reset(self) -> None:
        """Forget what has arrived: the sums of D^T (X v), of D, and of what the projection takes from the bias."""
        self._expected = self._column_sum = self.probe.new_zeros(self._weight.shape[0])
        self._bias_correction = None
        self._replaced = set()
        self._rows = 0
        self._task = -1


def can_watch(layer: ProtectedLayer, *, always: bool) -> bool:
    """Return whether a layer's inputs can be watched and, unless ``always``, whether that may pay off."""
    if not layer.layer_type.is_linear or len(layer.sources) != 1 or layer.is_input_proven is False:
        return False
    weight = layer.weight.tensor
    if find_local_rows(weight) is not None or layer.subspace is None:
        return False
    return always or weight.numel() * layer.subspace.width > WORTH_WATCHING


def close_watches(watches: Iterable[InputWatch], reason: str) -> None:
    """Stop watching layers."""
    for watch in watches:
        watch.close(reason)


def _is_close(a: Tensor, b: Tensor) -> Tensor:
    close: Tensor = (a - b).norm() <= PROOF_TOLERANCE * a.norm()
    return close


class _Call:
    """One forward pass of a watched layer.

    Attributes:
        is_replaced: Whether the saved input was replaced by its projection.
        probed: X v, or X' v if X was replaced; None if the layer's input was not saved.
        constant_removed: What the projection takes from the constant input of each row.
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
        """Return what autograd is to save in place of a tensor: its projection if it is the layer's input."""
        watch = self._watch
        is_input = (
            self.probed is None
            and tensor.data_ptr() == self._pointer
            and tensor.numel() == self._numel
            and tensor.dtype == self._dtype == watch.probe.dtype
            and tensor.device == watch.probe.device  # a model may move
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
            self._watch.arrive(D.detach().reshape(-1, D.shape[-1]), self)


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
    """End a forward pass, by return or by exception."""
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
