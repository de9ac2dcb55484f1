"""The weights of a model as of the last update, as a reference for comparisons."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sgp.projection.sharded import gather_whole

# Names of the inner module in compiled, checkpointed and fully sharded modules.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class Anchor(dict[str, Tensor]):
    """Parameters and buffers of a model at one moment, by name.

    Args:
        tensors: Copies of the parameters and buffers.
        protected: Names of the parameters that a memory protects or freezes.
    """

    def __init__(self, tensors: Mapping[str, Tensor], protected: frozenset[str]) -> None:
        super().__init__(tensors)
        self.protected = protected


def list_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name. Unlike a state dict this runs no hooks."""
    parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


def match_names(model: nn.Module, weights: Mapping[str, Tensor], known: Mapping[int, str]) -> dict[str, Tensor]:
    """Return weights by their names in a model, and by the names that are known from an earlier scan.

    Names are compared without wrappers: a module may have been wrapped since, and a state dict may omit wrappers.

    Args:
        model: Any module.
        weights: Parameters and buffers by name; those that the model does not have keep their names.
        known: Name of each parameter in the earlier scan, by the parameter's identity.

    Returns:
        Parameters and buffers by all of these names.
    """
    by_bare_name = {_strip_wrappers(name): value for name, value in weights.items()}
    matched = dict(weights)
    for name, tensor in list_tensors(model).items():
        names = (known.get(id(tensor), name), name)
        found = next((by_bare_name[bare] for bare in map(_strip_wrappers, names) if bare in by_bare_name), None)
        if found is not None:
            matched |= dict.fromkeys(names, found)
    return matched


def unwrap_module(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers for compilation, checkpointing and sharding."""
    inside = next((module._modules[name] for name in WRAPPERS if name in module._modules), None)
    return module if inside is None else unwrap_module(inside)


def _strip_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def copy_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's parameters and buffers by name."""
    return {name: value.detach().clone() for name, value in list_tensors(model).items()}


def has_grown(then: Tensor, now: Tensor) -> bool:
    """Return whether a parameter has gained rows, such as those of a vocabulary that has grown."""
    return then.dim() > 0 and then.shape[1:] == now.shape[1:] and len(then) < len(now)


def extend_rows(then: Tensor, now: Tensor) -> Tensor:
    """Return an earlier value of a parameter, completed by the current values of rows that it has gained since."""
    if not isinstance(then, Tensor) or not has_grown(then, now):
        return then
    return torch.cat([gather_whole(then).to(now), gather_whole(now)[len(then) :]])
