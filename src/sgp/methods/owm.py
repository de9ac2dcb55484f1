"""OWM (Zeng et al., Nature Machine Intelligence 2019): steps are orthogonal to the mean inputs of earlier tasks."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from sgp.methods.calls import Call, compute_gradients, record_calls
from sgp.methods.layer_settings import check_setting, get_value
from sgp.methods.method import Batch, Method, Moment, NormStatistics, sum_bytes, use_mode
from sgp.methods.settings import OWMFacts, OWMSettings
from sgp.patterns import find_pattern
from sgp.projection.layer_types import get_layer_type

Layer = nn.Linear | nn.Conv2d


class OWM(OWMFacts, Method[OWMSettings]):
    """Orthogonal weights modification.

    Each layer has a projector P [d, d], at first I. For each batch, with r the mean of the layer's inputs over it:

        P := P - (P r)(P r)^T / (alpha + r^T P r)     G := G P     alpha = alpha_start alpha_decay^(share of the task)

    so that P = alpha (A A^T + alpha I)^-1 with the r of all batches as columns of A, if alpha is constant. The r of a
    convolution are the patches of the mean map, one after another; all at once, as rows of R, they give

        P := P - P R^T (alpha I + R P R^T)^-1 R P

    A bias is the weight of one more input, which is 1. Parameters of other layers, such as norms, and stored BatchNorm
    statistics stay as the first task leaves them. The projection of the gradient is that of the step for plain SGD.
    The projected gradient of a wide linear layer is computed as D^T (X P), which is the same; see sgp.methods.calls.

    Attributes:
        layers: Protected layers by name.
        projectors: P of each layer, [groups, d, d].
    """

    state_names = ("projectors", "tasks")

    def __init__(self, network: nn.Module, settings: OWMSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.layers: dict[str, Layer] = {
            name: module
            for name, module in network.named_modules()
            if isinstance(module, Layer) and get_layer_type(module) is not None and not find_pattern(name, exclude)
        }
        # In float64: alpha is far below what float32 resolves beside 1, and P must stay positive.
        self.projectors: dict[str, Tensor] = {}
        self.tasks = 0
        # The same in the gradients' own precision, computed when a step needs it.
        self._rounded: dict[str, Tensor] = {}
        check_setting(network, "alpha_decay", settings.alpha_decay)
        self._decays = {name: get_value("alpha_decay", settings.alpha_decay, name) for name in self.layers}

    @property
    def norm_statistics(self) -> NormStatistics:
        return "per-task" if self.tasks else "shared"

    def step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> float:
        optimizer.zero_grad()
        wide = self._find_wide(rows=len(batch[1]))
        updates = self.settings.update == "step"
        with record_calls(self.layers if updates else wide) as calls:
            loss = self.compute_loss(batch, head, moment)
        left_out = {id(parameter) for layer in wide.values() for parameter in layer.parameters()}
        parameters = self.network.named_parameters()
        wanted = {name: p for name, p in parameters if p.requires_grad and id(p) not in left_out}
        gradients, deltas = compute_gradients(loss, wanted, [call for call in calls if call.layer in wide])
        with torch.no_grad():
            for name, parameter in wanted.items():
                parameter.grad = gradients.get(name)
            self._update_projectors(calls if updates else [], moment.share_of_task)
            self._project_gradients(wide, deltas)
            clip_grad_norm_(self.network.parameters(), self.settings.clip_norm)
        optimizer.step()
        return loss.item()

    def _find_wide(self, *, rows: int) -> dict[str, Layer]:
        """Return the linear layers whose inputs are cheaper to project than their gradients, without tied weights."""
        weights = [id(weight) for _, weight in self.network.named_parameters(remove_duplicate=False)]
        return {
            name: layer
            for name, layer in self.layers.items()
            if isinstance(layer, nn.Linear)
            and name in self.projectors
            and 2 * rows <= layer.out_features
            and weights.count(id(layer.weight)) == 1
        }

    @torch.no_grad()
    def consolidate(self, batches: Iterable[Batch], log_likelihood: Callable[[Batch], Tensor]) -> None:
        if self.settings.update == "task":
            # Iterated twice, since alpha depends on the number of examples.
            again = list(batches) if isinstance(batches, Iterator) else batches
            whole, done = sum(len(labels) for _, labels in again), 0
            with use_mode(self.network, training=False):
                for batch in again:
                    with record_calls(self.layers) as calls:
                        log_likelihood(batch)
                    self._update_projectors(calls, done / whole)
                    done += len(batch[1])
        self._rounded.clear()
        self.tasks += 1

    def _update_projectors(self, calls: Sequence[Call], share: float) -> None:
        """Update the projectors by the mean inputs of the calls on one batch, at some share of the task."""
        for name, input, _ in calls:
            rows = self._unfold_rows(name, input.detach().mean(dim=0, keepdim=True))
            if name not in self.projectors:
                groups, _, d = rows.shape
                self.projectors[name] = torch.eye(d, dtype=torch.float64, device=rows.device).repeat(groups, 1, 1)
            alpha = self.settings.alpha_start * self._decays[name] ** share
            shrink_projector(self.projectors[name], rows.double(), alpha)
            self._rounded.pop(name, None)

    def _unfold_rows(self, name: str, input: Tensor) -> Tensor:
        """Return an input as the rows that the weight multiplies, with a 1 for the bias: [groups, n, d]."""
        layer = self.layers[name]
        layer_type = get_layer_type(layer)
        assert layer_type is not None
        rows = layer_type.unfold_rows(layer, input)
        return rows if layer.bias is None else torch.cat([rows, torch.ones_like(rows[..., :1])], dim=-1)

    def _multiply(self, name: str, matrices: Tensor) -> Tensor:
        """Multiply matrices [groups, n, d] by P."""
        if name not in self._rounded:
            self._rounded[name] = self.projectors[name].to(matrices.dtype)
        return matrices @ self._rounded[name]

    def _project_gradients(self, wide: Container[str], deltas: Sequence[tuple[Call, Tensor]]) -> None:
        """Project gradients. Wide layers have none yet, but calls and the gradients of their outputs."""
        for name in self.projectors:
            if name in wide:
                own = [(call.input, D) for call, D in deltas if call.layer == name]
                if own:
                    X = torch.cat([self._unfold_rows(name, input) for input, _ in own], dim=1)
                    D = torch.cat([D.reshape(-1, D.shape[-1]) for _, D in own])
                    self._set_gradient(name, D.mT @ self._multiply(name, X))
            elif self.layers[name].weight.grad is not None:
                self._set_gradient(name, self._multiply(name, self._get_gradient(name)))
        if self.tasks:
            for parameter in self._list_unprotected():
                parameter.grad = None

    def _get_gradient(self, name: str) -> Tensor:
        """Return a layer's gradient as matrices with the bias' gradient as their last column: [groups, n, d]."""
        weight, bias, groups = self.layers[name].weight, self.layers[name].bias, len(self.projectors[name])
        assert weight.grad is not None
        joint = weight.grad.reshape(groups, len(weight) // groups, -1)
        if bias is None:
            return joint
        assert bias.grad is not None
        return torch.cat([joint, bias.grad.reshape(groups, -1, 1)], dim=-1)

    def _set_gradient(self, name: str, joint: Tensor) -> None:
        """Set a layer's gradient from such matrices."""
        weight, bias = self.layers[name].weight, self.layers[name].bias
        if bias is not None:
            bias.grad = joint[..., -1].reshape(bias.shape)
            joint = joint[..., :-1]
        weight.grad = joint.reshape(weight.shape)

    def _list_unprotected(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of layers without a projector that do not belong to single tasks."""
        protected = {id(parameter) for layer in self.layers.values() for parameter in layer.parameters()}
        for name, parameter in self.network.named_parameters():
            if id(parameter) not in protected and not find_pattern(name, self.exclude):
                yield parameter

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._rounded.clear()

    def count_bytes(self) -> dict[str, int]:
        return {"projectors": sum_bytes([self.projectors, self._rounded])}

    def measure_free(self) -> dict[str, float]:
        def measure(projector: Tensor) -> float:
            return projector.diagonal(dim1=-2, dim2=-1).sum().item() / projector[..., 0].numel()

        return {name: measure(self.projectors[name]) if name in self.projectors else 1.0 for name in self.layers}


def shrink_projector(projector: Tensor, rows: Tensor, alpha: float) -> None:
    """Remove rows from a projector in place, all at once with the result of one after another.

    Args:
        projector: P, [groups, d, d].
        rows: R, [groups, n, d].
        alpha: Regularizer.
    """
    if rows.shape[1] > rows.shape[2]:
        # Only R^T R matters: a triangle of d rows has the same.
        rows = torch.linalg.qr(rows, mode="r").R
    projected = rows @ projector
    inner = torch.baddbmm(
        torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device).expand(len(rows), -1, -1),
        rows,
        projected.mT,
        beta=alpha,
    )
    # With inner = L L^T the change is -V^T V, V = L^-1 R P. Nothing is raised here: if there are NaNs the loss is NaN
    # too, and the trainer reports it.
    root = torch.linalg.cholesky_ex(inner).L
    change = torch.linalg.solve_triangular(root, projected, upper=False)
    projector.baddbmm_(change.mT, change, alpha=-1)
