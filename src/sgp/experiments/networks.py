"""Networks of runs, and the settings that a network refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sgp.benchmarks.stream import Stream
from sgp.experiments.config import Config, SupervisedSettings
from sgp.experiments.device import find_device
from sgp.experiments.optimizers import get_head_parameters
from sgp.experiments.realign import get_head
from sgp.experiments.seeds import derive_seed
from sgp.networks import NETWORKS


def build_network(config: Config[SupervisedSettings], stream: Stream) -> nn.Module:
    """Build the config's network for a task stream, initialized by the run's seed."""
    kind = NETWORKS[config.network]
    stored = "batch" if config.trainer.norm_statistics == "batch" else "stored"
    offered = {"statistics": stored, "bias": config.trainer.network_bias}
    options = {name: value for name, value in offered.items() if name in kind.options}
    network = initialize_network(config, stream.inputs, stream.heads, **options)
    check_batch_sizes(config, network)
    if config.trainer.realign:
        check_own_heads(network, stream)
    return network


def initialize_network(
    config: Config[Any], inputs: tuple[int, ...], outputs: Sequence[int], **options: Any
) -> nn.Module:
    """Build the config's network with weights from the run's seed, on its device and in its memory format."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.seed, "weights"))
        network = NETWORKS[config.network].build(inputs, outputs, **options)
    if config.channels_last:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network.to(find_device(config))


def check_batch_sizes(config: Config[SupervisedSettings], network: nn.Module) -> None:
    """Raise an error if BatchNorm of vectors would have to normalize a single example by its own statistics."""
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm1d)]
    uses_batch = {"batch": bool(norms), "test_batch": any(not norm.track_running_stats for norm in norms)}
    for name, matters in uses_batch.items():
        if matters and getattr(config.trainer, name) < 2:
            raise ValueError(f"{name} must be at least 2 for the BatchNorm of {config.network}, got 1")


def check_own_heads(network: nn.Module, stream: Stream) -> None:
    """Raise an error unless each task has a linear head of its own.

    A head that learns the new task too cannot be fitted to its features for the sake of an earlier task.
    """
    try:
        if len(stream.heads) < len(stream):
            raise AttributeError("all tasks share one")
        for task in range(len(stream)):
            get_head(network, task)
    except AttributeError as error:
        raise ValueError(f"realign needs a network with a linear head for each task: {error}") from error


def check_trained_heads(network: nn.Module, trained: nn.Module) -> None:
    """Raise an error if no head is trained, so that a learning rate of the heads would have no effect."""
    parameters = set(trained.parameters())
    if not any(parameter in parameters for parameter in get_head_parameters(network)):
        raise ValueError("head_lr is the learning rate of the network's heads, but no head is trained")
