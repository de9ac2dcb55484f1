"""Projection modes: three equivalent ways to project a step.

- ``step``: Keep the weights, let the optimizer step, project the difference. Exact for every optimizer, since nothing
  needs to be known about it; with Adam this is the paper's Adam-GP (Algorithm 2).
- ``gradient``: Project the gradient before the step. Exact where the step is linear in the gradients: SGD without
  weight decay, with or without momentum.
- ``input``: As ``gradient``, but the gradient is already computed from projected inputs (``input_mode.py``).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from sgp.projection.layer import (
    HALF_PRECISION,
    ProtectedLayer,
    ProtectedParameter,
    iterate_parameters,
)
from sgp.projection.sharded import find_local_rows, get_local
from sgp.projection.stack import stack_layers
from sgp.projection.tokens import TokenSubspace

Mode = Literal["auto", "step", "gradient", "input"]
MODES = ("auto", "step", "gradient", "input")


class ProjectionMode:
    """Base class of what happens to some layers at a step; it owns their buffers. By itself it does nothing.

    Attributes:
        acts_after_step: Whether there is anything to do once the optimizer has stepped.
    """

    acts_after_step: ClassVar[bool] = True

    def before_step(self) -> None:
        """Prepare the step."""

    def after_step(self) -> None:
        """Complete the step."""

    def flush(self) -> None:
        """Project the change of all steps since the last projection."""

    def discard(self) -> None:
        """Forget a change that is still to be projected, since the weights that it was of are gone."""

    @contextmanager
    def projected(self) -> Iterator[None]:
        """Run the body with the weights that :meth:`flush` would leave; restore everything afterwards."""
        yield


class FrozenMode(ProjectionMode):
    """Put parameters back after every step.

    Args:
        parameters: Frozen parameters that the optimizer steps.
    """

    def __init__(self, parameters: Sequence[ProtectedParameter]) -> None:
        self._parameters = parameters
        self._kept = [torch.empty_like(parameter.local) for parameter in parameters]

    def before_step(self) -> None:
        torch._foreach_copy_(self._kept, [parameter.local for parameter in self._parameters])

    def after_step(self) -> None:
        torch._foreach_copy_([parameter.local for parameter in self._parameters], self._kept)


class StepMode(ProjectionMode):
    """Project what the optimizer has changed.

    The change of several steps can be projected at once, since the projection of a sum is the sum of the projections.

    Args:
        layers: Layers to project.
        stepped: Identities of the parameters that the optimizer holds. A bias of another optimizer changes with its
            weight all the same.
        accumulates: Whether a change that is still to be projected stays so at the next step, and both are projected
            together. If not, such a change is of a step that has failed.
    """

    def __init__(self, layers: Sequence[ProtectedLayer], stepped: Container[int], *, accumulates: bool) -> None:
        self._accumulates = accumulates
        self._stacks, self._layers = stack_layers(layers)
        self._parameters = list(iterate_parameters(layers))
        self._single = list(iterate_parameters(self._layers))
        self._plain = [p for p in self._single if _is_plain(p)]
        self._special = [p for p in self._single if not _is_plain(p)]
        self._plain_tensors: list[Tensor] = [p.tensor for p in self._plain]
        self._lent = [p for p in self._parameters if id(p.tensor) not in stepped and not p.is_stepped]
        self._unchanged: list[ProtectedParameter] = []
        self._is_pending = False

    def before_step(self) -> None:
        if self._is_pending and self._accumulates:
            return
        for parameter in self._parameters:
            if parameter.pending not in (None, self):
                parameter.pending.flush()
        # To train a bias of another optimizer by its weight's steps is no training without projection.
        self._unchanged = [parameter for parameter in self._lent if not parameter.has_changed()]
        self._keep_weights()
        self._set_pending(True)

    def _keep_weights(self) -> None:
        for stack in self._stacks:
            torch._foreach_copy_(stack.views, stack.tensors)
        for parameter, tensor in zip(self._plain, self._plain_tensors, strict=True):
            if parameter.kept is None or not _has_same_layout(parameter.kept, tensor):
                parameter.kept = torch.empty_like(tensor, requires_grad=False)
        if self._plain:
            torch._foreach_copy_([p.kept for p in self._plain if p.kept is not None], self._plain_tensors)
        for parameter in self._special:
            parameter.keep()

    def discard(self) -> None:
        self._set_pending(False)

    def _set_pending(self, is_pending: bool) -> None:
        self._is_pending = is_pending
        for parameter in self._parameters:
            parameter.pending = self if is_pending else None

    @torch.no_grad()
    def flush(self) -> None:
        if not self._is_pending:
            return
        self._set_pending(False)
        for stack in self._stacks:
            stack.follow_weights()
            torch._foreach_sub_(stack.views, stack.tensors)
            stack.subtract_projection_(stack.tensors, sign=-1.0)
        self._project_layers()
        for parameter in self._unchanged:
            parameter.fingerprint = parameter.compute_fingerprint()

    def _project_layers(self) -> None:
        """Project the layers that are not in a stack."""
        for parameter in self._single:
            parameter.adapt_kept()
        for layer in self._layers:
            if layer.layer_type.is_lookup:
                _restore_blocked_tokens(layer)
        changes = {parameter: parameter.compute_change() for parameter in self._single}
        for layer in self._layers:
            bias = layer.bias
            change = changes[layer.weight], None if bias is None else changes[bias]
            layer.subtract_projection_(change, (layer.weight.target, None if bias is None else bias.target))
            if layer.is_two_sided:  # the other side projects what this one has left
                layer.project_(*change)
        for parameter in self._special:
            parameter.write_master()

    @contextmanager
    def projected(self) -> Iterator[None]:
        if not self._is_pending:
            yield
            return
        saved = [(p, p.local.clone(), p.master, p.fingerprint) for p in self._parameters]
        kept = [None if p.kept is None else p.kept.clone() for p in self._single]
        stacked = [[view.clone() for view in stack.views] for stack in self._stacks]
        for parameter in self._special:
            parameter.master = None if parameter.master is None else parameter.master.clone()
        self.flush()
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value, master, fingerprint in saved:
                    parameter.local.copy_(value)
                    parameter.master, parameter.fingerprint = master, fingerprint
            for parameter, before in zip(self._single, kept, strict=True):
                parameter.kept = before
            for stack, views in zip(self._stacks, stacked, strict=True):
                torch._foreach_copy_(stack.views, views)
            self._set_pending(True)


class GradientMode(ProjectionMode):
    """Project the gradient.

    Args:
        layers: Layers to project.
    """

    acts_after_step = False

    def __init__(self, layers: Sequence[ProtectedLayer]) -> None:
        self._stacks, self._layers = stack_layers(layers)

    def before_step(self) -> None:
        for stack in self._stacks:
            gradients = [tensor.grad for tensor in stack.tensors]
            present = [gradient for gradient in gradients if gradient is not None]
            if len(present) < len(gradients):
                project_gradients(stack.layers)
            else:
                torch._foreach_copy_(stack.views, present)
                stack.subtract_projection_(present)
        project_gradients(self._layers)


def project_gradients(layers: Iterable[ProtectedLayer]) -> None:
    """Project the gradients of layers in place (Eq. 3)."""
    for layer in layers:
        weight, bias = layer.weight.tensor, None if layer.bias is None else layer.bias.tensor
        if weight.grad is None and (bias is None or bias.grad is None):
            continue
        weight_gradient = _ensure_gradient(weight)
        layer.project_(weight_gradient, None if bias is None else _ensure_gradient(bias))


def project_momentum(layer: ProtectedLayer, buffers: Sequence[Tensor | None], *, tolerance: float) -> list[Tensor]:
    """Project momentum buffers of a layer's weight and bias, unless that was done before.

    Args:
        layer: Layer whose momentum it is.
        buffers: Buffer of the weight, and of the bias if it is protected; at least one is given.
        tolerance: Share along blocked directions up to which buffers count as projected.

    Returns:
        The buffers, with zeros in place of the missing one: a joint change has both parts.
    """
    tensors = [parameter.tensor for parameter in layer.parameters]
    whole = [torch.zeros_like(t) if b is None else b for b, t in zip(buffers, tensors, strict=True)]
    local = [get_local(buffer) for buffer in whole]
    if tolerance == 0 or layer.compute_blocked_share(*local) > tolerance:
        layer.project_(*local)
    return whole


def _ensure_gradient(parameter: nn.Parameter) -> Tensor:
    """Return what this process holds of a gradient; zeros where there is none, since a joint change has both parts."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return get_local(parameter.grad)


def _restore_blocked_tokens(layer: ProtectedLayer) -> None:
    """Restore the vectors of fully blocked tokens to the bit: to subtract their change would leave its rounding."""
    _, subspace = layer.get_projector()
    kept = layer.weight.kept
    assert isinstance(subspace, TokenSubspace)
    assert kept is not None
    rows = subspace.fixed
    layer.weight.local.index_copy_(0, rows, kept.index_select(0, rows))


def _is_plain(parameter: ProtectedParameter) -> bool:
    """Return whether a parameter is whole on this process and needs no float32 master."""
    tensor = parameter.tensor
    return tensor.dtype not in HALF_PRECISION and find_local_rows(tensor) is None


def _has_same_layout(kept: Tensor, tensor: Tensor) -> bool:
    return kept.shape == tensor.shape and kept.dtype == tensor.dtype and kept.device == tensor.device
