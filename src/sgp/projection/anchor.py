"""The weights of a model as of the last update, to compare with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from sgp.projection.sharded import gather_whole

# Names under which compiled, checkpointed and fully sharded modules hold what they wrap.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class Anchor(Mapping[str, Tensor]):
    """Parameters and buffers of a model at one moment, by name.

    Args:
        tensors: Copies of the parameters and buffers.
        protected: Names of the parameters that a memory protects or freezes.
    """

    def __init__(self, tensors: Mapping[str, Tensor], protected: frozenset[str]) -> None:
        self._tensors = dict(tensors)
        self.protected = protected

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def list_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name. Unlike a state dict this runs no hooks."""
    parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


def match_names(model: nn.Module, weights: Mapping[str, Tensor], known: Mapping[int, str]) -> dict[str, Tensor]:
    """Return weights by the names that they have in a model, and by those under which they are known.

    A wrapper that was put around a module since, or that a state dict leaves out of its names, does not count.

    Args:
        model: Any module.
        weights: Parameters and buffers by name; what the model does not have keeps its name.
        known: Names under which parameters were found, by the parameter's identity.
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
    """Return the module inside of wrappers for compilation, checkpointing and sharding."""
    inside = next((module._modules[name] for name in WRAPPERS if name in module._modules), None)
    return module if inside is None else unwrap_module(inside)


def _strip_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def copy_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's parameters and buffers by name."""
    return {name: value.detach().clone() for name, value in list_tensors(model).items()}


def has_grown(then: Tensor, now: Tensor) -> bool:
    """Return whether a parameter has more rows than it had, as where a vocabulary has grown."""
    return then.dim() > 0 and then.shape[1:] == now.shape[1:] and len(then) < len(now)


def extend_rows(then: Tensor, now: Tensor) -> Tensor:
    """Return an earlier value of a parameter with the rows that it has gained since, as they are now."""
    if not isinstance(then, Tensor) or not has_grown(then, now):
        return then
    return torch.cat([gather_whole(then).to(now), gather_whole(now)[len(then) :]])
