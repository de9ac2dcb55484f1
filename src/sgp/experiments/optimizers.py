"""Optimizers of a run, and their state in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

# A step of Adam passes about ten times over all parameters, a fused one once, which saves a fifth of a step of MiniLM.
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": SGD,
    "adam": partial(Adam, fused=True),
    "adamw": partial(AdamW, fused=True),
}
# Option of a parameter group: the factor of its learning rate.
LR_FACTOR = "lr_factor"


def separate_heads(optimizer: Optimizer, network: nn.Module, factor: float) -> None:
    """Move the parameters of the network's heads to a group of their own.

    Args:
        optimizer: Optimizer of the network.
        network: Network with `heads`.
        factor: Learning rate of the heads as a multiple of the other parameters' learning rate.
    """
    heads = set(get_head_parameters(network))
    own: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        own += [parameter for parameter in group["params"] if parameter in heads]
        group["params"] = [parameter for parameter in group["params"] if parameter not in heads]
    optimizer.add_param_group({"params": own, LR_FACTOR: factor})


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of each group, times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(LR_FACTOR, 1.0)


def get_head_parameters(network: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the network's heads."""
    return [parameter for name, parameter in network.named_parameters() if name.startswith("heads.")]


def get_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return what an optimizer stores for each parameter, by the parameter's number."""
    return {str(number): dict(own) for number, own in optimizer.state_dict()["state"].items()}


def restore_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Restore what `get_optimizer_state` returned; the optimizer keeps its learning rate and other options."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, own in state.items():
        parameter = parameters[int(number)]
        for name, value in own.items():
            # In the parameter's memory format, as the optimizer itself would have created it.
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                value = torch.empty_like(parameter).copy_(value)
            elif isinstance(value, Tensor) and optimizer.defaults.get("fused"):  # the number of steps of a fused Adam
                value = value.to(parameter.device)
            optimizer.state[parameter][name] = value
