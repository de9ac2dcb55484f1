"""Which parameters of a model are guarded, by which blocks, and why the others are not."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter

from sgp.patterns import find_pattern
from sgp.projection.layer_types import Block, LayerType, get_layer_type
from sgp.projection.sharded import check_layout, find_fsdp_modules, get_local

BiasRule = Literal["protect", "freeze"]

# Norm layers of other libraries are known by their names.
NORM = re.compile(r"norm(\dd)?$", re.IGNORECASE)
NOT_TRAINED = "not trained (requires_grad is False)"
GUARDED_BIAS = "bias of a guarded layer"
LONE_BIAS = "bias of a layer whose weight is not guarded"

_Key = tuple[int, tuple[int, int | None], int]  # a block by its parameter, slice and side


@dataclass(frozen=True)
class Source:
    """Where a guard's input is seen: a module and the name of one of its inputs."""

    module: str
    input: str


@dataclass
class Guard:
    """A block in its place in the model.

    Attributes:
        name: the module's name, with the input's name behind a colon where the module has several blocks.
        block: the slice of the parameter.
        layer_type: how the module shows its input.
        weight: qualified name of the parameter.
        bias: qualified name of the bias that is protected together with the weight; None if there is none or
            it is frozen.
        sources: the inputs to gather; more than one where a weight is tied between modules.
    """

    name: str
    block: Block
    layer_type: LayerType
    weight: str
    bias: str | None
    sources: list[Source]

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters that change together."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]


@dataclass
class Layout:
    """A model's parameters, sorted by what happens to them.

    Attributes:
        guards: the blocks by name.
        frozen: parameter -> why it does not move after the first task.
        free: parameter, or running statistic -> why it moves without protection.
        statistics: names of modules whose running statistics are frozen with the rest.
        two_sided: weights that are guarded from both sides.
    """

    guards: dict[str, Guard] = field(default_factory=dict)
    frozen: dict[str, str] = field(default_factory=dict)
    free: dict[str, str] = field(default_factory=dict)
    statistics: list[str] = field(default_factory=list)
    two_sided: set[str] = field(default_factory=set)


def layout_of(
    model: nn.Module,
    *,
    exclude: Sequence[str],
    bias: BiasRule,
    rest: Literal["freeze", "free"],
    strict: bool,
    held: Mapping[str, int] | None = None,
) -> Layout:
    """Sort a model's parameters.

    ``held`` has the dimension of the guards that have bases. They stay, though they may not be trained just now,
    and protect the bias if they did so before.

    Raises:
        TypeError: a weight is parametrized, or spread over processes in a way that steps cannot deal with, or
            ``strict`` and a layer type is not known.
    """
    layout = Layout()
    held = held or {}
    canonical = {id(p): name for name, p in model.named_parameters()}
    strangers = _uses_by_unknown_types(model, exclude)
    guarded: dict[_Key, Guard] = {}
    own_biases: dict[_Key, set[str | None]] = {}
    bias_users: dict[tuple[str, tuple[int, int | None]], set[_Key]] = {}
    storages: dict[int, nn.Parameter] = {}
    reasons: dict[str, str] = {}  # of biases
    shared: dict[str, str] = {}  # weight -> unknown layer type that has it too

    for module_name, module in model.named_modules():
        layer_type = get_layer_type(module)
        if layer_type is None or find_pattern(module_name, exclude):
            continue
        blocks = layer_type.find_blocks(module)
        for block, name in zip(blocks, _names(module_name or "(model)", blocks), strict=True):
            weight = _parameter(module, block.weight, module_name)
            offset = _parameter(module, block.bias, module_name) if block.bias else None
            if weight is None:
                continue
            key = (id(weight), block.rows, block.input_dim)
            weight_name = canonical[id(weight)]
            bias_name = None if offset is None else canonical[id(offset)]
            if bias_name is not None:
                bias_users.setdefault((bias_name, block.bias_rows or block.rows), set()).add(key)
            is_trained = weight.requires_grad or name in held
            if not is_trained or find_pattern(weight_name, exclude) or id(weight) in strangers or weight.is_complex():
                if id(weight) in strangers:
                    shared[weight_name] = strangers[id(weight)]
                if bias_name is not None:
                    reasons.setdefault(bias_name, LONE_BIAS)
                continue
            shard = get_local(weight)
            place = shard.data_ptr() if shard.numel() else 0
            owner = storages.setdefault(place, weight)
            if owner is not weight and place != 0:
                raise TypeError(
                    f"layer {module_name!r}: its {block.weight} shares memory with {canonical[id(owner)]!r} but is "
                    "another parameter, so each step would be projected twice. Tie the parameters themselves"
                )
            own_biases.setdefault(key, set()).add(bias_name)
            source = Source(module_name, block.input)
            if key in guarded:
                guarded[key].sources.append(source)
                continue
            protect = bias == "protect" and offset is not None
            if name in held:
                protect = protect and held[name] != block.count_inputs(weight)
            else:
                protect = protect and offset is not None and offset.requires_grad
            protect = protect and bias_name is not None and not find_pattern(bias_name, exclude)
            guard = Guard(name, block, layer_type, weight_name, bias_name if protect else None, [source])
            guarded[key] = layout.guards[name] = guard

    for key, guard in guarded.items():
        weight_id, rows, input_dim = key
        is_two_sided = (weight_id, rows, 1 - input_dim) in guarded
        if is_two_sided:
            layout.two_sided.add(guard.weight)
        is_tied = len(own_biases[key]) > 1 or is_two_sided
        biases = {name for name in own_biases[key] if name is not None}
        is_shared = any(name in biases and len(users) > 1 for (name, _), users in bias_users.items())
        # One weight with two biases, or met from both sides, has no joint change to project, and a bias of
        # two weights has two: such biases stay put.
        if is_tied or is_shared:
            guard.bias = None
        why = "tied weight" if is_tied else "shared" if is_shared else "bias"
        reasons |= dict.fromkeys(biases, f"{GUARDED_BIAS}, frozen ({why})")

    _sort_the_rest(model, layout, exclude=exclude, rest=rest, strict=strict, reasons=reasons, shared=shared)
    check_layouts(layout, dict(model.named_parameters()).get, by_fsdp=bool(find_fsdp_modules(model)))
    return layout


def check_layouts(layout: Layout, find: Callable[[str], Tensor | None], *, by_fsdp: bool) -> None:
    """Raise if a parameter that is guarded or frozen is spread over processes in a way that steps cannot deal with.

    Args:
        layout: of a model.
        find: gives a parameter of it by name, or None.
        by_fsdp: whether ``fully_shard`` was called on a module of it.
    """
    weights = {guard.bias: find(guard.weight) for guard in layout.guards.values() if guard.bias is not None}
    held = [name for guard in layout.guards.values() for name in guard.parameters]
    for name in (*held, *layout.frozen):
        parameter = find(name)
        if parameter is not None:
            check_layout(name, parameter, by_fsdp=by_fsdp, weight=weights.get(name))


def _uses_by_unknown_types(model: nn.Module, exclude: Sequence[str]) -> dict[int, str]:
    """Parameters that layers of unknown types have, by id, with the type's name."""
    return {
        id(parameter): type(module).__name__
        for name, module in model.named_modules()
        if get_layer_type(module) is None and not find_pattern(name, exclude)
        for parameter in module.parameters(recurse=False)
    }


def _names(module_name: str, blocks: Sequence[Block]) -> list[str]:
    """A name for each block: its module's, and behind a colon what tells it from the module's others."""
    if len(blocks) == 1:
        return [module_name]
    tails = [block.input for block in blocks]
    if len(set(tails)) < len(tails):
        tails = [block.weight for block in blocks]
    if len(set(tails)) < len(tails):
        tails = [f"{block.weight}[{block.rows[0]}:{block.rows[1] or ''}]" for block in blocks]
    return [f"{module_name}:{tail}" for tail in tails]


def _sort_the_rest(
    model: nn.Module,
    layout: Layout,
    *,
    exclude: Sequence[str],
    rest: Literal["freeze", "free"],
    strict: bool,
    reasons: dict[str, str],
    shared: dict[str, str],
) -> None:
    """Say of each parameter that no guard holds what happens to it and why."""
    held = {name for guard in layout.guards.values() for name in guard.parameters}
    for name, parameter in model.named_parameters():
        if name in held:
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        is_norm = isinstance(owner, _NormBase) or NORM.search(type(owner).__name__) is not None
        if pattern := find_pattern(name, exclude):
            layout.free[name] = f"excluded by {pattern!r}"
        elif not parameter.requires_grad:
            layout.frozen[name] = NOT_TRAINED
        elif reasons.get(name, "").startswith(GUARDED_BIAS):
            layout.frozen[name] = reasons[name]
        elif name in reasons or is_norm:
            (layout.frozen if rest == "freeze" else layout.free)[name] = reasons.get(name, "norm")
        else:
            kind = shared.get(name, type(owner).__name__)
            if strict:
                raise TypeError(
                    f"parameter {name!r}: the layer type {kind} is not known (strict=True). Register it with "
                    "sgp.register_layer, or exclude it"
                )
            why = f"unsupported layer type {kind}" + (", which shares it" if name in shared else "")
            (layout.frozen if rest == "freeze" else layout.free)[name] = why
    for name, module in model.named_modules():
        if not isinstance(module, _NormBase) or module.running_mean is None:
            continue
        pattern = find_pattern(name, exclude)
        if rest == "freeze" and not pattern:
            layout.statistics.append(name)
            continue
        why = f"running statistics, {f'excluded by {pattern!r}' if pattern else 'norm'}"
        layout.free |= {f"{name}.{leaf}": why for leaf in ("running_mean", "running_var")}


def _parameter(module: nn.Module, name: str, module_name: str) -> nn.Parameter | None:
    """A parameter of a module by its dotted name; None where the module has none of that name."""
    owner_name, _, leaf = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    if leaf in getattr(owner, "parametrizations", {}) or (leaf not in owner._parameters and hasattr(owner, leaf)):
        value = getattr(owner, leaf)
        if value is None:
            return None
        raise TypeError(
            f"layer {module_name!r}: its {name} is parametrized, so a step changes it through other "
            "parameters and cannot be projected. Remove the parametrization, or exclude the layer"
        )
    value = owner._parameters.get(leaf)
    if isinstance(value, UninitializedParameter):
        raise TypeError(f"layer {module_name!r} is lazy and has no weights yet: run a batch through the model first")
    return value
