"""Stored statistics of BatchNorm, estimated for the weights as they are and for the network as it is used at test.

Those that training gathers on its way do not fit either: they lag behind the weights, and come from maps that dropout
has been at. Where a maximum is taken over what dropout has scaled up, as in AlexNet, that moves the means far.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@torch.no_grad()
def estimate_statistics(network: nn.Module, batches: Iterable[tuple[Tensor, int | Tensor]]) -> None:
    """Set running means and variances to those of some batches, with dropout off; nothing if the network has none.

    Args:
        network: `network(inputs, head)`; its modes are as before afterwards.
        batches: inputs, and the head of their task, or of each of them.
    """
    norms = [module for module in network.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not norms:
        return
    modes = {module: module.training for module in network.modules()}
    momenta = [norm.momentum for norm in norms]
    network.eval()
    for norm in norms:
        norm.train()
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean over the batches
    try:
        for inputs, head in batches:
            network(inputs, head)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, mode in modes.items():
            module.training = mode
