"""Projection modes: three equivalent ways to project a step.

- ``step``: Keep the weights, let the optimizer step, and project the difference. Exact for every optimizer; with Adam
  this is the paper's Adam-GP (Algorithm 2).
- ``gradient``: Project the gradient before the step. Exact if the step is linear in the gradients: SGD without weight
  decay, with or without momentum.
- ``input``: Compute the gradient from projected inputs (``input_mode.py``). Exact where ``gradient`` is.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from sgp.projection.layer import ProtectedLayer, ProtectedParameter, iterate_parameters
from sgp.projection.sharded import get_local
from sgp.projection.stack import stack_layers
from sgp.projection.tokens import TokenSubspace

Mode = Literal["auto", "step", "gradient", "input"]
MODES = ("auto", "step", "gradient", "input")


class ProjectionMode:
    """Base class of projection modes. A mode projects the steps of some layers and owns their buffers.

    Attributes:
        acts_after_step: Whether the mode does anything after the optimizer's step.
    """

    acts_after_step: ClassVar[bool] = True

    def before_step(self) -> None:
        """Prepare the step."""

    def after_step(self) -> None:
        """Complete the step."""

    def flush(self) -> None:
        """Project the change of all steps since the last projection."""

    def discard(self) -> None:
        """Discard the pending change."""

    @contextmanager
    def projected(self) -> Iterator[None]:
        """Run the body with the weights that :meth:`flush` would leave, and restore everything afterwards.

        Yields:
            Nothing.
        """
        yield


class FrozenMode(ProjectionMode):
    """Restore parameters after every step.

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
    """Project the change that the optimizer has made.

    The change of several steps can be projected at once, since the projection of a sum is the sum of the projections.

    Args:
        layers: Layers to project.
        stepped: Identities of the optimizer's parameters. The projection of a weight also changes a bias that belongs
            to another optimizer.
        accumulates: Whether the changes of several steps are projected together. If not, a change that is still pending
            at the next step is discarded, since its own step has failed.
    """

    def __init__(self, layers: Sequence[ProtectedLayer], stepped: Container[int], *, accumulates: bool) -> None:
        self._accumulates = accumulates
        self._stacks, self._layers = stack_layers(layers)
        self._parameters = list(iterate_parameters(layers))
        self._single = list(iterate_parameters(self._layers))
        self._not_stepped = [p for p in self._parameters if id(p.tensor) not in stepped and not p.is_stepped]
        self._unchanged: list[ProtectedParameter] = []
        self._is_pending = False

    def before_step(self) -> None:
        if self._is_pending and self._accumulates:
            return
        for parameter in self._parameters:
            if parameter.pending not in (None, self):
                parameter.pending.flush()
        # The projection of a weight changes its bias. If no attached optimizer steps the bias, its fingerprint follows,
        # so that an update does not take this for training without projection.
        self._unchanged = [parameter for parameter in self._not_stepped if not parameter.has_changed()]
        for stack in self._stacks:
            torch._foreach_copy_(stack.views, stack.tensors)
        for parameter in self._single:
            parameter.keep()
        self._set_pending(True)

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
            if layer.is_two_sided:  # the layer of the other side projects what is left
                layer.project_(*change)
        for parameter in self._single:
            if parameter.master is not None:
                parameter.local.copy_(parameter.master)

    @contextmanager
    def projected(self) -> Iterator[None]:
        if not self._is_pending:
            yield
            return
        saved = [(p, p.local.clone(), p.kept, p.master, p.fingerprint) for p in self._parameters]
        stacked = [(stack, [view.clone() for view in stack.views]) for stack in self._stacks]
        for parameter in self._single:  # the projection changes the copies
            parameter.kept = None if parameter.kept is None else parameter.kept.clone()
            parameter.master = None if parameter.master is None else parameter.master.clone()
        self.flush()
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value, kept, master, fingerprint in saved:
                    parameter.local.copy_(value)
                    parameter.kept, parameter.master, parameter.fingerprint = kept, master, fingerprint
            for stack, views in stacked:
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
    """Project the momentum buffers of a layer's weight and bias, unless they are projected already.

    Args:
        layer: Protected layer.
        buffers: Buffer of the weight, and of the bias if it is protected; at least one is not None.
        tolerance: Share along blocked directions up to which buffers count as projected.

    Returns:
        The buffers, with zeros for a missing one, since weight and bias are projected together.
    """
    tensors = [parameter.tensor for parameter in layer.parameters]
    whole = [torch.zeros_like(t) if b is None else b for b, t in zip(buffers, tensors, strict=True)]
    local = [get_local(buffer) for buffer in whole]
    if tolerance == 0 or layer.compute_blocked_share(*local) > tolerance:
        layer.project_(*local)
    return whole


def _ensure_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the local part of a gradient; zeros if there is none, since weight and bias are projected together."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return get_local(parameter.grad)


def _restore_blocked_tokens(layer: ProtectedLayer) -> None:
    """Restore the vectors of fully blocked tokens exactly: subtracting their change would leave a rounding error."""
    projector, kept = layer.get_projector(), layer.weight.kept
    assert projector is not None
    assert isinstance(projector[1], TokenSubspace)
    assert kept is not None
    rows = projector[1].fixed
    layer.weight.local.index_copy_(0, rows, kept.index_select(0, rows))
