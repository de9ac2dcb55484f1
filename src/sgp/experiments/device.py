"""Device and precision of a run. Networks are built on the CPU, so all devices start with the same weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sgp.experiments.config import Config
from sgp.experiments.folder import RunError


def find_device(config: Config[Any]) -> torch.device:
    """Return the config's device, with its index.

    Raises:
        RunError: This machine has no such device, or torch was built without support for it.
    """
    try:
        return torch.zeros(0, device=config.device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(f"the device {config.device!r} is not available ({reason}): choose another --device") from error


def use_precision(config: Config[Any], device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which the config's precision is used."""
    if config.precision == "float32":
        return nullcontext()
    # Without the cache, since casts of weights must not outlive the step that changes the weights.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def move_tensors(state: Any, device: torch.device) -> Any:
    """Return a state of dictionaries and sequences with its tensors on a device."""
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, dict):
        return {name: move_tensors(value, device) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(move_tensors(value, device) for value in state)
    return state


def get_device(network: nn.Module) -> torch.device:
    """Return the device of a network, which is the same for all its parameters."""
    return next(network.parameters()).device
