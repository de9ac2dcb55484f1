"""What training has done to a batch since the last update: leak into the protected space, output drift."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sgp.projection.collect import collect_inputs, evaluation_pass, make_forward
from sgp.projection.distributed import ProcessGroup
from sgp.projection.layout import Guard
from sgp.projection.protection import Protection
from sgp.projection.sharded import distribute_like, gather_whole, get_local

# A weight that has changed by less than this share of itself has only been rounded.
ROUNDING = 2.0**-20


@dataclass(frozen=True)
class LayerCheck:
    """One guarded block.

    Attributes:
        layer: its name.
        held: share of the energy of this batch's inputs that lies in the block's bases.
        leak: share of the weight change that lies along bases of importance 1, where nothing may move.
        drift: |dW x| / |W x| over this batch: how far the change moves the block's output for these inputs.
    """

    layer: str
    held: float
    leak: float
    drift: float


@dataclass(frozen=True)
class Check:
    """A batch's outputs now against the reference weights.

    Attributes:
        drift: relative change of the model's outputs.
        layers: the same per block.
    """

    drift: float
    layers: list[LayerCheck]

    @property
    def leak(self) -> float:
        """The largest leak of any block."""
        return max((layer.leak for layer in self.layers), default=0.0)

    def __str__(self) -> str:
        width = max([len("layer"), *(len(layer.layer) for layer in self.layers)])
        lines = [
            f"outputs drifted by {self.drift:.2e}",
            f"{'layer':<{width}} {'held':>8} {'leak':>9} {'drift':>9}",
        ]
        for layer in self.layers:
            lines.append(f"{layer.layer:<{width}} {layer.held:>8.1%} {layer.leak:>9.1e} {layer.drift:>9.1e}")
        return "\n".join(lines)


def check(
    protection: Protection,
    batch: Any,
    reference: Mapping[str, Tensor],
    forward: Callable[[Any], Any] | None,
    mask: Callable[[Any], Tensor | None] | None = None,
) -> Check:
    """Measure one batch against a reference state dict; ``forward`` and ``mask`` as in an update."""
    model = protection.model
    guards = [guard for guard in protection.layout.guards.values() if guard.name in protection.subspaces]
    team = ProcessGroup(protection.is_sharded)  # then its forward passes are of all processes together
    team.run_together(partial(refuse_unfit, reference, protection, guards))
    names = [guard.name for guard in guards]
    statistics = team.run_together(
        partial(
            collect_inputs,
            model,
            [batch],
            guards,
            forward=forward,
            mask=mask,
            samples=dict.fromkeys(names),
            precise=dict.fromkeys(names, True),
            in_step=team.run_in_lockstep if protection.is_sharded else None,
        )
    )
    run = forward or make_forward(model)
    present = tensors_of(model)
    reference = {name: lengthened(value, present.get(name, value)) for name, value in reference.items()}
    then_laid_out = {name: distribute_like(value, present.get(name, value)) for name, value in reference.items()}
    with evaluation_pass(model, ()), protection.unflushed():
        now = _outputs(run(batch))
        try:
            model.load_state_dict(then_laid_out, strict=False)
            then = _outputs(run(batch))
        finally:
            model.load_state_dict(present, strict=False)
        layers = []
        protection.reshard()
        for guard in guards:
            old = _joint(guard, reference)
            new = _joint(guard, {name: protection.parameter(name) for name in guard.parameters})
            if guard.name not in statistics:
                continue
            statistic, subspace = statistics[guard.name], protection.subspaces[guard.name]
            change = new - old.to(new.device)
            energy = float(statistic.compute_energy().sum())
            moved = float(change.norm())
            if moved <= ROUNDING * float(old.norm()):  # a layer that is full does not move but for rounding
                moved = 0.0
            layers.append(
                LayerCheck(
                    layer=guard.name,
                    held=_ratio(float(subspace.compute_captured_energy(statistic).sum()), energy),
                    leak=_ratio(float(subspace.compute_blocked_coefficients(*_split(change, guard)).norm()), moved),
                    drift=_ratio(
                        float(statistic.compute_energy_through(change).sum()) ** 0.5,
                        float(statistic.compute_energy_through(old).sum()) ** 0.5,
                    ),
                )
            )
    drifted = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(now, then, strict=True)) ** 0.5
    size = sum(float(b.double().square().sum()) for b in then) ** 0.5
    return Check(_ratio(drifted, size), layers)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of a model's parameters and buffers, as they are: a state dict would be projected first."""
    named = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    return {name: value.detach().clone() for name, value in named.items()}


def refuse_unfit(reference: Mapping[str, Tensor], protection: Protection, guards: Sequence[Guard]) -> None:
    """Raise if a reference lacks a guarded weight, has one of another shape, or is the model's own."""
    for name in {name for guard in guards for name in guard.parameters}:
        if name not in reference:
            raise ValueError(f"reference: there is no {name!r}; give a whole state_dict of the model")
        given, own = get_local(reference[name]), protection.get_local(name)
        if own.numel() and given.data_ptr() == own.data_ptr():
            raise ValueError(
                "reference: these are the model's own tensors, which training changes; keep a copy, "
                "copy.deepcopy(model.state_dict())"
            )
        then, now = reference[name].shape, protection.parameter(name).shape
        if then != now and not has_grown(reference[name], protection.parameter(name)):
            raise ValueError(f"reference: {name!r} has shape {tuple(then)}, the model's has {tuple(now)}")


def has_grown(then: Tensor, now: Tensor) -> bool:
    """Whether a parameter has more rows than it had, as where a vocabulary has grown."""
    return then.dim() > 0 and then.shape[1:] == now.shape[1:] and len(then) < len(now)


def lengthened(then: Tensor, now: Tensor) -> Tensor:
    """A reference of a parameter that has grown since, with the new rows as they are now: none of them has drifted."""
    if not isinstance(then, Tensor) or not has_grown(then, now):
        return then
    return torch.cat([gather_whole(then).to(now), gather_whole(now)[len(then) :]])


def _joint(guard: Guard, parameters: Mapping[str, Tensor]) -> Tensor:
    """Weight and protected bias, gathered where they are sharded, as one matrix in float64. [groups, out, d]"""
    matrix = guard.block.view_matrix(gather_whole(parameters[guard.weight])).double()
    if guard.bias is None:
        return matrix
    return torch.cat(
        [matrix, guard.block.view_bias(gather_whole(parameters[guard.bias])).double().unsqueeze(-1)], dim=-1
    )


def _split(matrix: Tensor, guard: Guard) -> tuple[Tensor, Tensor | None]:
    """What :func:`_joint` joined."""
    return (matrix, None) if guard.bias is None else (matrix[..., :-1], matrix[..., -1])


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole != 0 else 0.0


def _outputs(value: Any) -> list[Tensor]:
    found = list(_tensors(value))
    if not found:
        raise TypeError(
            f"an output of type {type(value).__name__} has no floating point tensor to compare: give "
            "forward=, which returns tensors, or tuples, lists or dicts of them"
        )
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    """All floating point tensors in an output of nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
