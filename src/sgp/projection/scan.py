"""Sort a model's parameters into protected ones, with their layers, and frozen and free ones, with the reasons."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedParameter

from sgp.patterns import find_pattern
from sgp.projection.layer import ProtectedLayer, ProtectedParameter, Source
from sgp.projection.layer_types import Block, LayerType, get_layer_type
from sgp.projection.sharded import check_layout, find_fsdp_modules, get_local

BiasRule = Literal["protect", "freeze"]
RestRule = Literal["freeze", "free"]

# Norm layers of other libraries are known by their names.
NORM = re.compile(r"norm(\dd)?$", re.IGNORECASE)
NOT_TRAINED = "not trained (requires_grad is False)"
PROTECTED_BIAS = "bias of a protected layer"
LONE_BIAS = "bias of a layer whose weight is not protected"
UNKNOWN_TYPE = "unknown layer type"

# The identity of a weight, the rows of the block, and the dimension of its input.
BlockKey = tuple[int, tuple[int, int | None], int]


@dataclass(frozen=True)
class ScanRules:
    """The settings of a memory that decide which parameters it protects.

    Attributes:
        exclude: Patterns on names of modules and parameters that stay free.
        bias: Whether biases are protected with their weights or frozen.
        rest: What happens to all other parameters after the first task.
        strict: Whether a layer of an unknown type is an error.
    """

    exclude: tuple[str, ...] = ()
    bias: BiasRule = "protect"
    rest: RestRule = "freeze"
    strict: bool = False


@dataclass
class Scan:
    """The sorted parameters of a model.

    Attributes:
        layers: Protected layers by name, in the model's order.
        frozen: Parameter -> why it does not change after the first task.
        free: Parameter or norm statistic -> why it changes without protection.
        norm_modules: Names of the modules whose norm statistics are frozen with the rest.
        parameters: Every protected or frozen parameter by name.
    """

    layers: dict[str, ProtectedLayer] = field(default_factory=dict)
    frozen: dict[str, str] = field(default_factory=dict)
    free: dict[str, str] = field(default_factory=dict)
    norm_modules: list[str] = field(default_factory=list)
    parameters: dict[str, ProtectedParameter] = field(default_factory=dict)


def scan_model(model: nn.Module, rules: ScanRules, *, dimensions: Mapping[str, int] | None = None) -> Scan:
    """Sort the parameters of a model.

    A ``TypeError`` is raised if a weight is parametrized, or sharded in a way that steps cannot project, or if a layer
    type is unknown and ``rules.strict`` is set.

    Args:
        model: Any module.
        rules: Settings of the memory.
        dimensions: Input dimensions of the layers that have bases, by name. These layers stay protected even if they
            are not trained at the moment, and protect the bias if they did so before.

    Returns:
        The sorted parameters.
    """
    return _Scanner(model, rules, dimensions or {}).scan()


@dataclass(frozen=True)
class _Candidate:
    """A block of the model with its parameters, before it is known whether it is protected."""

    name: str
    module_name: str
    block: Block
    layer_type: LayerType
    weight: nn.Parameter
    bias: nn.Parameter | None

    @property
    def key(self) -> BlockKey:
        return id(self.weight), self.block.rows, self.block.input_dim


class _Scanner:
    """The three passes of a scan: find the blocks, decide about their biases, and sort all other parameters."""

    def __init__(self, model: nn.Module, rules: ScanRules, dimensions: Mapping[str, int]) -> None:
        self._model = model
        self._rules = rules
        self._dimensions = dimensions
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._unknown_users = _find_unknown_users(model, rules.exclude)
        self._result = Scan()
        self._layer_by_key: dict[BlockKey, ProtectedLayer] = {}
        self._biases: dict[BlockKey, set[str | None]] = {}  # biases of a protected block in all of its modules
        self._bias_users: dict[tuple[str, tuple[int, int | None]], set[BlockKey]] = {}
        self._weight_by_storage: dict[int, nn.Parameter] = {}
        self._bias_reasons: dict[str, str] = {}
        self._shared_with_unknown: dict[str, str] = {}  # weight -> name of the unknown type that shares it

    def scan(self) -> Scan:
        """Return the sorted parameters."""
        for candidate in self._iterate_blocks():
            self._note_bias(candidate)
            if self._is_protectable(candidate):
                self._protect(candidate)
        for key in self._layer_by_key:
            self._decide_bias(key)
        self._sort_other_parameters()
        self._sort_norm_statistics()
        self._register_parameters()
        check_scan(self._result, by_fsdp=bool(find_fsdp_modules(self._model)))
        return self._result

    def _iterate_blocks(self) -> Iterator[_Candidate]:
        for module_name, module in self._model.named_modules():
            layer_type = get_layer_type(module)
            if layer_type is None or find_pattern(module_name, self._rules.exclude):
                continue
            blocks = _find_blocks(layer_type, module, module_name)
            for block, name in zip(blocks, _name_blocks(module_name or "(model)", blocks), strict=True):
                weight = _get_parameter(module, block.weight, module_name)
                bias = _get_parameter(module, block.bias, module_name) if block.bias else None
                if weight is not None:
                    yield _Candidate(name, module_name, block, layer_type, weight, bias)

    def _note_bias(self, candidate: _Candidate) -> None:
        if candidate.bias is not None:
            place = self._names[id(candidate.bias)], candidate.block.bias_rows or candidate.block.rows
            self._bias_users.setdefault(place, set()).add(candidate.key)

    def _is_protectable(self, candidate: _Candidate) -> bool:
        weight = candidate.weight
        name = self._names[id(weight)]
        unknown = self._unknown_users.get(id(weight))
        if unknown is not None:
            self._shared_with_unknown[name] = unknown
        is_trained = weight.requires_grad or candidate.name in self._dimensions
        if is_trained and unknown is None and not weight.is_complex() and not find_pattern(name, self._rules.exclude):
            return True
        if candidate.bias is not None:
            self._bias_reasons.setdefault(self._names[id(candidate.bias)], LONE_BIAS)
        return False

    def _protect(self, candidate: _Candidate) -> None:
        """Add a block to the protected layers, or its module to the sources of a layer with the same block."""
        self._check_storage(candidate)
        key = candidate.key
        bias_name = None if candidate.bias is None else self._names[id(candidate.bias)]
        self._biases.setdefault(key, set()).add(bias_name)
        source = Source(candidate.module_name, candidate.block.input)
        if key in self._layer_by_key:
            self._layer_by_key[key].sources.append(source)
            return
        layer = ProtectedLayer(
            candidate.name,
            candidate.block,
            candidate.layer_type,
            self._get_parameter(self._names[key[0]]),
            self._get_parameter(bias_name) if bias_name and self._protects_bias(candidate) else None,
            [source],
        )
        self._layer_by_key[key] = self._result.layers[candidate.name] = layer

    def _protects_bias(self, candidate: _Candidate) -> bool:
        bias = candidate.bias
        if bias is None or self._rules.bias != "protect" or find_pattern(self._names[id(bias)], self._rules.exclude):
            return False
        known = self._dimensions.get(candidate.name)
        return bias.requires_grad if known is None else known != candidate.block.count_inputs(candidate.weight)

    def _check_storage(self, candidate: _Candidate) -> None:
        shard = get_local(candidate.weight)
        place = shard.data_ptr() if shard.numel() else 0
        owner = self._weight_by_storage.setdefault(place, candidate.weight)
        if place and owner is not candidate.weight:
            raise TypeError(
                f"layer {candidate.module_name!r}: its {candidate.block.weight} shares memory with "
                f"{self._names[id(owner)]!r} but is another parameter, so each step would be projected twice: use one "
                "parameter in both layers"
            )

    def _decide_bias(self, key: BlockKey) -> None:
        """Freeze a bias that does not change with a single weight: of a tied weight, or shared between blocks."""
        layer, (weight, rows, input_dim) = self._layer_by_key[key], key
        layer.is_two_sided = (weight, rows, 1 - input_dim) in self._layer_by_key
        is_tied = len(self._biases[key]) > 1 or layer.is_two_sided
        biases = {name for name in self._biases[key] if name is not None}
        is_shared = any(name in biases and len(users) > 1 for (name, _), users in self._bias_users.items())
        if is_tied or is_shared:
            layer.bias = None
        reason = "tied weight" if is_tied else "shared" if is_shared else "bias"
        self._bias_reasons |= dict.fromkeys(biases, f"{PROTECTED_BIAS}, frozen ({reason})")

    def _sort_other_parameters(self) -> None:
        """Sort the parameters that no layer protects into frozen and free ones, with the reasons."""
        protected = {p.name for layer in self._result.layers.values() for p in layer.parameters}
        rest = self._result.frozen if self._rules.rest == "freeze" else self._result.free
        for name, parameter in self._model.named_parameters():
            reason = self._bias_reasons.get(name, "")
            if name in protected:
                continue
            if pattern := find_pattern(name, self._rules.exclude):
                self._result.free[name] = f"excluded by {pattern!r}"
            elif not parameter.requires_grad:
                self._result.frozen[name] = NOT_TRAINED
            elif reason.startswith(PROTECTED_BIAS):
                self._result.frozen[name] = reason
            else:
                rest[name] = reason or self._describe_owner(name)

    def _describe_owner(self, name: str) -> str:
        """Return why a parameter that is not the bias of a known layer type is not protected.

        Raises:
            TypeError: Its layer type is unknown and ``strict`` is set.
        """
        owner = self._model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, _NormBase) or NORM.search(type(owner).__name__):
            return "norm"
        type_name = self._shared_with_unknown.get(name, type(owner).__name__)
        if self._rules.strict:
            raise TypeError(
                f"parameter {name!r}: the layer type {type_name} is unknown (strict=True): register it with "
                "sgp.register_layer, or exclude it"
            )
        return f"{UNKNOWN_TYPE} {type_name}" + (", which shares it" if name in self._shared_with_unknown else "")

    def _sort_norm_statistics(self) -> None:
        for name, module in self._model.named_modules():
            if not isinstance(module, _NormBase) or module.running_mean is None:
                continue
            pattern = find_pattern(name, self._rules.exclude)
            if self._rules.rest == "freeze" and not pattern:
                self._result.norm_modules.append(name)
                continue
            reason = f"norm statistics, {f'excluded by {pattern!r}' if pattern else 'norm'}"
            self._result.free |= {f"{name}.{leaf}": reason for leaf in ("running_mean", "running_var")}

    def _register_parameters(self) -> None:
        protected = {p.name: p for layer in self._result.layers.values() for p in layer.parameters}
        frozen = {name: self._get_parameter(name) for name in self._result.frozen}
        self._result.parameters = protected | frozen

    def _get_parameter(self, name: str) -> ProtectedParameter:
        known = self._result.parameters.get(name)
        if known is None:
            path, _, leaf = name.rpartition(".")
            known = self._result.parameters[name] = ProtectedParameter(name, self._model.get_submodule(path), leaf)
        return known


def check_scan(scan: Scan, *, by_fsdp: bool) -> None:
    """Check that steps can project the layout of every protected or frozen parameter.

    Args:
        scan: Sorted parameters of a model.
        by_fsdp: Whether ``fully_shard`` was called on a module of the model.
    """
    weights = {layer.bias.name: layer.weight for layer in scan.layers.values() if layer.bias is not None}
    for name, parameter in scan.parameters.items():
        if parameter.is_present:
            weight = weights.get(name)
            weight_tensor = weight.tensor if weight is not None and weight.is_present else None
            check_layout(name, parameter.tensor, by_fsdp=by_fsdp, weight=weight_tensor)


def _find_unknown_users(model: nn.Module, exclude: Sequence[str]) -> dict[int, str]:
    """Return the type names of the modules of unknown types that have parameters, by the parameter's identity."""
    return {
        id(parameter): type(module).__name__
        for name, module in model.named_modules()
        if get_layer_type(module) is None and not find_pattern(name, exclude)
        for parameter in module.parameters(recurse=False)
    }


def _find_blocks(layer_type: LayerType, module: nn.Module, module_name: str) -> Sequence[Block]:
    try:
        return layer_type.find_blocks(module)
    except TypeError as error:  # the layer type does not know the module's name
        raise TypeError(f"layer {module_name or '(model)'!r}: {error}") from error


def _name_blocks(module_name: str, blocks: Sequence[Block]) -> list[str]:
    """Return a name for each block: the name of its module, with a suffix if the module has several blocks."""
    if len(blocks) == 1:
        return [module_name]
    suffixes = [block.input for block in blocks]
    if len(set(suffixes)) < len(suffixes):
        suffixes = [block.weight for block in blocks]
    if len(set(suffixes)) < len(suffixes):
        suffixes = [f"{block.weight}[{block.rows[0]}:{block.rows[1] or ''}]" for block in blocks]
    return [f"{module_name}:{suffix}" for suffix in suffixes]


def _get_parameter(module: nn.Module, name: str, module_name: str) -> nn.Parameter | None:
    owner_name, _, leaf = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    if leaf in getattr(owner, "parametrizations", {}) or (leaf not in owner._parameters and hasattr(owner, leaf)):
        if getattr(owner, leaf) is None:
            return None
        raise TypeError(
            f"layer {module_name!r}: its {name} is parametrized, so a step changes it through other parameters and "
            "cannot be projected: remove the parametrization, or exclude the layer"
        )
    parameter = owner._parameters.get(leaf)
    if isinstance(parameter, UninitializedParameter):
        raise TypeError(f"layer {module_name!r} is lazy and has no weights yet: run a batch through the model first")
    return parameter
