"""The input side: project a linear layer's batch inputs instead of its weight gradient.

The weight gradient of a linear layer is D^T X, and (D^T X)(I - M L M^T) = D^T (X - (X M) L M^T): projecting
the n rows of X is the same number as projecting the gradient, at n/out of the cost. The input that autograd
saves for the weight gradient is replaced by its projection while the layer's forward runs; the layer, its
output and its input gradient are untouched.

That is right only if the whole gradient comes from inputs that were replaced. A weight may also be used
functionally, be tied, stand in a penalty; the saved tensor may be a copy (autocast, a non-contiguous input).
So every step is proved: for a random vector v, G v must equal the sum of D^T (X v) over the backward passes
that were watched. A gradient with anything else in it fails, and is then projected in full.
"""

from __future__ import annotations

from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from sgp.projection.subspace import Subspace

# Rounding of the two sides of the proof in float32 differs by about 1e-6 of their size.
PROOF_TOLERANCE = 1e-5

# Forwards that are under way, by module; apart from what is watched, which may end in the middle of one.
_open: dict[int, list[tuple[_Call, saved_tensors_hooks] | None]] = {}
# Watched modules are kept here and not on themselves: a copy or a file of the model knows nothing of it.
_watched: WeakKeyDictionary[nn.Module, InputSide] = WeakKeyDictionary()
_hooks: list[RemovableHandle] = []


class InputSide:
    """Watches one linear layer and replaces the inputs that its weight gradient is made of, once that has proved right.

    The first step is a trial: inputs are only watched, and the gradient is projected as ever. If the proof
    holds and there are at most half as many rows as outputs, inputs are replaced from then on. The first proof
    that fails ends it.

    Attributes:
        mode: ``"trial"``, ``"replace"`` or ``"off"``.
        why: why it is off.
    """

    def __init__(self, module: nn.Module, weight: nn.Parameter, bias: nn.Parameter | None, subspace: Subspace) -> None:
        self.mode: Literal["trial", "replace", "off"] = "trial"
        self.why = ""
        self.subspace = subspace
        self._has_bias = bias is not None
        generator = torch.Generator().manual_seed(0)  # the user's random state is not touched
        probe = torch.randn(weight.shape[1], generator=generator, dtype=torch.float64)
        self._probe = probe.to(weight.device, weight.dtype)
        self._weight = weight
        # What has arrived since the last step: the sum of D^T (X v), of D, of what the projection takes from
        # the bias.
        self._expected = self._column_sum = self._probe.new_zeros(())
        self._bias_correction: Tensor | None = None
        self._replaced: set[bool] = set()
        self._rows = 0
        self._task = -1  # the backward pass that arrived last
        _watched[module] = self
        if not _hooks:
            _hooks.append(register_module_forward_pre_hook(_before_forward))
            _hooks.append(register_module_forward_hook(_after_forward, always_call=True))

    def close(self, why: str) -> None:
        """Watch no longer."""
        self.mode, self.why = "off", why
        for module in [module for module, side in _watched.items() if side is self]:
            del _watched[module]
        _remove_hooks_if_idle()

    def settle(self, weight: nn.Parameter, bias: nn.Parameter | None) -> bool:
        """Before an optimizer's step: whether the gradient is projected already. If not, it has to be now."""
        replaced, rows = self._replaced, self._rows
        factor = self._proof(weight, bias)
        correction = self._bias_correction
        self._reset()
        if self.mode == "trial":
            if factor is None:
                self.close("its gradient does not come from its inputs alone")
            elif 2 * rows > weight.shape[0]:
                self.close("a batch has more rows than the gradient")
            elif rows:
                self.mode = "replace"
            return False
        if factor is not None and replaced == {True}:
            if bias is not None and bias.grad is not None and correction is not None:
                # The gradient of a bias has no saved input to replace; its projection is the same sum over
                # rows.
                bias.grad.sub_(correction, alpha=factor)
            return True
        if replaced != {False}:  # only passes that began before inputs were replaced: nothing is wrong
            self.close("its gradient does not come from its inputs alone")
        return False

    def enter(self, module: nn.Module, input: Tensor) -> None:
        """The layer's forward begins."""
        calls = _open.setdefault(id(module), [])
        # Somebody else's hooks (checkpointing, offloading) would be hidden by ours.
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
            try:
                call = _Call(self, input)
                context = saved_tensors_hooks(call.pack, _unchanged)
                context.__enter__()
                calls.append((call, context))
                return
            except RuntimeError:  # torch.func has tensors without storage, and forbids such hooks
                pass
        calls.append(None)

    def arrive(self, D: Tensor, call: _Call) -> None:
        """A backward pass reaches the layer with the gradient of its output."""
        task = torch._C._current_graph_task_id()
        if self._weight.grad is None and task != self._task:
            self._reset()  # what came before was thrown away by zero_grad
        self._task = task
        assert call.probed is not None
        self._expected = self._expected + D.mT @ call.probed
        if self._has_bias:
            self._column_sum = self._column_sum + D.sum(0)
            if call.constant_removed is not None:
                removed = D.mT @ call.constant_removed
                self._bias_correction = removed if self._bias_correction is None else self._bias_correction + removed
        self._replaced.add(call.replaced)
        self._rows += D.shape[0]

    def _reset(self) -> None:
        self._expected = self._column_sum = self._probe.new_zeros(())
        self._bias_correction = None
        self._replaced = set()
        self._rows, self._task = 0, -1

    def _proof(self, weight: nn.Parameter, bias: nn.Parameter | None) -> float | None:
        """The factor between the gradient and what was watched (1, or clipping's); None if they differ."""
        if weight.grad is None or not self._replaced or weight.grad.dtype != self._probe.dtype:
            return None
        found, expected = weight.grad @ self._probe, self._expected
        factor = float(found @ expected) / max(float(expected @ expected), torch.finfo(torch.float32).tiny)
        if not _equal(found, factor * expected):
            return None
        if bias is not None and (bias.grad is None or not _equal(bias.grad, factor * self._column_sum)):
            return None
        return factor


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= PROOF_TOLERANCE * a.norm())


class _Call:
    """One forward of a watched layer."""

    def __init__(self, side: InputSide, input: Tensor) -> None:
        self.replaced = False
        self.probed: Tensor | None = None  # X v, or X' v if X was replaced
        self.constant_removed: Tensor | None = None  # what the projection takes from the constant input of each row
        self._side = side
        self._pointer = input.data_ptr()
        self._numel = input.numel()
        self._dtype = input.dtype

    def pack(self, tensor: Tensor) -> Tensor:
        """Autograd saves a tensor: if it is the layer's input, save its projection."""
        side = self._side
        is_input = (
            self.probed is None
            and tensor.data_ptr() == self._pointer
            and tensor.numel() == self._numel
            and tensor.dtype == self._dtype == side._probe.dtype
            and tensor.device == side._probe.device  # a model may move
            and tensor.is_contiguous()
        )
        if not is_input:
            return tensor
        with torch.no_grad():
            rows = tensor.detach().reshape(-1, side._probe.shape[0])
            if side.mode != "replace":
                self.probed = rows @ side._probe
                return tensor
            projected = rows.clone().unsqueeze(0)
            ones = projected.new_ones(1, rows.shape[0]) if side._has_bias else None
            side.subspace.subtract_projection_(rows.unsqueeze(0), ones, projected, ones)
            if ones is not None:
                self.constant_removed = 1 - ones[0]
            self.probed = projected[0] @ side._probe
            self.replaced = True
            return projected.view(tensor.shape)

    def backward(self, gradients: tuple[Tensor, ...]) -> None:
        """Hook before the layer's backward."""
        D = gradients[0]
        if D is not None:
            self._side.arrive(D.detach().reshape(-1, D.shape[-1]), self)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _before_forward(module: nn.Module, args: tuple[Any, ...]) -> None:
    if torch.compiler.is_compiling():
        return
    side = _watched.get(module)
    if side is not None and torch.is_grad_enabled() and args and isinstance(args[0], Tensor):
        side.enter(module, args[0])


def _after_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """The forward ends, by return or by exception."""
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
