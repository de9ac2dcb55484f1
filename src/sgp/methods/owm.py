"""OWM (Zeng et al., Nature Machine Intelligence 2019): steps are orthogonal to the mean inputs of earlier tasks."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from sgp.methods.calls import Call, recorded
from sgp.methods.method import Batch, Method, Moment, NormStatistics
from sgp.methods.settings.owm import OWMFacts, OWMSettings
from sgp.patterns import check_patterns, find_pattern
from sgp.projection.layer_types import get_layer_type

Layer = nn.Linear | nn.Conv2d


class OWM(OWMFacts, Method[OWMSettings]):
    """Orthogonal weights modification.

    Each layer has a projector P [d, d], at first I. For each batch, with r the mean of the layer's inputs over it:

        P := P - (P r)(P r)^T / (alpha + r^T P r)     G := G P     alpha = alpha_start alpha_decay^(share of the task)

    so that P = alpha (A A^T + alpha I)^-1 with the r of all batches as columns of A, if alpha is constant. The r of a
    convolution are the patches of the mean map, one after another; all at once, as rows of R, they give

        P := P - P R^T (alpha I + R P R^T)^-1 R P

    A bias is the weight of one more input, which is 1. Parameters of other layers, such as norms, and stored statistics
    of BatchNorm stay as the first task leaves them. The projection of the gradient is that of the step for plain SGD.
    That of a wide linear layer is made as D^T (X P), which is the same; see sgp.methods.calls.
    """

    def __init__(self, network: nn.Module, settings: OWMSettings, *, exclude: Sequence[str] = ()) -> None:
        super().__init__(network, settings, exclude=exclude)
        self.layers: dict[str, Layer] = {
            name: module
            for name, module in network.named_modules()
            if isinstance(module, Layer) and get_layer_type(module) is not None and not find_pattern(name, exclude)
        }
        # [groups, d, d] in float64: alpha is far below what float32 resolves beside 1, and P must stay positive.
        self.projectors: dict[str, Tensor] = {}
        self.tasks = 0
        # The same in the gradients' own precision, made when a step needs it.
        self._rounded: dict[str, Tensor] = {}
        if isinstance(settings.alpha_decay, dict):
            check_patterns(network, settings.alpha_decay, "alpha_decay")
        self._decays = {name: _of_layer(settings.alpha_decay, name) for name in self.layers}

    @property
    def statistics(self) -> NormStatistics:
        return "each" if self.tasks else "one"

    def step(self, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> float:
        optimizer.zero_grad()
        wide = self._wide(rows=len(batch[1]))
        with self._seen(self.settings.update == "step") as inputs, recorded(wide) as calls:
            loss = self.loss(batch, head, moment)
        apart = {id(parameter) for layer in wide.values() for parameter in layer.parameters()}
        asked = [p for p in self.network.parameters() if p.requires_grad and id(p) not in apart]
        edges: list[Any] = [*asked, *(call.output for call in calls)]  # torch takes both together
        found = torch.autograd.grad(loss, edges, allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(asked, found, strict=False):
                parameter.grad = gradient
            self._take_in(inputs, moment.share_of_task)
            self._project(wide, list(zip(calls, found[len(asked) :], strict=True)))
            clip_grad_norm_(self.network.parameters(), self.settings.clip_norm)
        optimizer.step()
        return loss.item()

    def _wide(self, *, rows: int) -> dict[str, Layer]:
        """Linear layers for which it pays to project the rows of their inputs; not a weight that has rows elsewhere."""
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
            # Gone through twice, since alpha wants to know how many examples there are.
            again = list(batches) if isinstance(batches, Iterator) else batches
            whole, done = sum(len(labels) for _, labels in again), 0
            with self._evaluating():
                for batch in again:
                    with self._seen(True) as inputs:
                        log_likelihood(batch)
                    self._take_in(inputs, done / whole)
                    done += len(batch[1])
        self._rounded.clear()
        self.tasks += 1

    @contextmanager
    def _seen(self, wanted: bool) -> Iterator[dict[str, list[Tensor]]]:
        """The inputs that layers get meanwhile, as means over the batch with a batch of one."""
        inputs: dict[str, list[Tensor]] = {}

        def before(name: str, input: Tensor) -> None:
            inputs.setdefault(name, []).append(input.detach().mean(dim=0, keepdim=True))

        handles = [
            layer.register_forward_pre_hook(lambda _, args, name=name: before(name, args[0]))
            for name, layer in self.layers.items()
            if wanted
        ]
        try:
            yield inputs
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = {module: module.training for module in self.network.modules()}
        self.network.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode

    def _take_in(self, inputs: Mapping[str, Sequence[Tensor]], share: float) -> None:
        """Update projectors by the mean inputs of one batch."""
        for name, means in inputs.items():
            alpha = self.settings.alpha_start * self._decays[name] ** share
            for mean in means:
                rows = self._rows(name, mean)
                if name not in self.projectors:
                    groups, _, d = rows.shape
                    self.projectors[name] = torch.eye(d, dtype=torch.float64, device=rows.device).repeat(groups, 1, 1)
                shrink(self.projectors[name], rows.double(), alpha)
                self._rounded.pop(name, None)

    def _rows(self, name: str, input: Tensor) -> Tensor:
        """An input as the rows that the weight multiplies, with a 1 for the bias: [groups, n, d]."""
        layer = self.layers[name]
        layer_type = get_layer_type(layer)
        assert layer_type is not None
        rows = layer_type.unfold_rows(layer, input)
        return rows if layer.bias is None else torch.cat([rows, torch.ones_like(rows[..., :1])], dim=-1)

    def _times_projector(self, name: str, matrices: Tensor) -> Tensor:
        """Matrices [groups, n, d] times P."""
        if name not in self._rounded:
            self._rounded[name] = self.projectors[name].to(matrices.dtype)
        return matrices @ self._rounded[name]

    def _project(self, wide: Container[str], calls: Sequence[tuple[Call, Tensor | None]]) -> None:
        """Project gradients. Wide layers have none yet, but calls and the gradients of their outputs."""
        for name in self.projectors:
            if name in wide:
                own = [(call.input, D) for call, D in calls if call.layer == name and D is not None]
                if own:
                    X = torch.cat([self._rows(name, input) for input, _ in own], dim=1)
                    D = torch.cat([D.reshape(-1, D.shape[-1]) for _, D in own])
                    self._set(name, D.mT @ self._times_projector(name, X))
            elif self.layers[name].weight.grad is not None:
                self._set(name, self._times_projector(name, self._joint(name)))
        if self.tasks:
            for parameter in self._rest():
                parameter.grad = None

    def _joint(self, name: str) -> Tensor:
        """A layer's gradient as matrices with that of the bias as their last column: [groups, n, d]."""
        weight, bias, groups = self.layers[name].weight, self.layers[name].bias, len(self.projectors[name])
        assert weight.grad is not None
        joint = weight.grad.reshape(groups, len(weight) // groups, -1)
        if bias is None:
            return joint
        assert bias.grad is not None
        return torch.cat([joint, bias.grad.reshape(groups, -1, 1)], dim=-1)

    def _set(self, name: str, joint: Tensor) -> None:
        """Make such matrices a layer's gradient."""
        weight, bias = self.layers[name].weight, self.layers[name].bias
        if bias is not None:
            bias.grad = joint[..., -1].reshape(bias.shape)
            joint = joint[..., :-1]
        weight.grad = joint.reshape(weight.shape)

    def _rest(self) -> Iterator[nn.Parameter]:
        """Parameters of layers that have no projector and are not of single tasks."""
        guarded = {id(parameter) for layer in self.layers.values() for parameter in layer.parameters()}
        for name, parameter in self.network.named_parameters():
            if id(parameter) not in guarded and not find_pattern(name, self.exclude):
                yield parameter

    def state_dict(self) -> dict[str, Any]:
        return {"projectors": dict(self.projectors), "tasks": self.tasks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.projectors = {name: projector.clone() for name, projector in state["projectors"].items()}
        self.tasks = state["tasks"]
        self._rounded.clear()

    def bytes(self) -> dict[str, int]:
        held = [*self.projectors.values(), *self._rounded.values()]
        return {"projectors": sum(projector.nbytes for projector in held)}

    def free(self) -> dict[str, float]:
        shares = {name: _trace(projector) / projector[..., 0].numel() for name, projector in self.projectors.items()}
        return {name: shares.get(name, 1.0) for name in self.layers}


def shrink(projector: Tensor, rows: Tensor, alpha: float) -> None:
    """Take rows out of a projector, in place, as one after another would be. [groups, d, d] and [groups, n, d]."""
    if rows.shape[1] > rows.shape[2]:
        # Only R^T R matters: a triangle of d rows has the same.
        rows = torch.linalg.qr(rows, mode="r").R
    taken = rows @ projector
    inner = torch.baddbmm(
        torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device).expand(len(rows), -1, -1),
        rows,
        taken.mT,
        beta=alpha,
    )
    # With inner = L L^T the change is -V^T V, V = L^-1 R P. Nothing is raised here: where numbers are none, so is the
    # loss, and the loop says so.
    root = torch.linalg.cholesky_ex(inner).L
    change = torch.linalg.solve_triangular(root, taken, upper=False)
    projector.baddbmm_(change.mT, change, alpha=-1)


def _trace(matrices: Tensor) -> float:
    return matrices.diagonal(dim1=-2, dim2=-1).sum().item()


def _of_layer(decay: float | dict[str, float], name: str) -> float:
    """The decay of a layer; where patterns are given, that of the first which matches."""
    if not isinstance(decay, dict):
        return decay
    pattern = find_pattern(name, decay)
    if pattern is None:
        raise ValueError(f"alpha_decay: no pattern matches the layer {name!r}; add one, such as '*'")
    return decay[pattern]
