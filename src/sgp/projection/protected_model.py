"""A model with its protected layers: the state that a memory shares with the hooks of its optimizers."""

from __future__ import annotations

import torch
from torch import nn

from sgp.projection.layer import ProtectedLayer, place_subspaces
from sgp.projection.norm_stats import FrozenNormStatistics
from sgp.projection.precision import full_precision
from sgp.projection.scan import Scan, check_scan
from sgp.projection.sharded import find_fsdp_modules, reshard
from sgp.projection.subspace import Bases


class ProtectedModel:
    """A model, how its parameters are sorted, and what the last update found.

    Attributes:
        model: The model, without wrappers.
        tasks: Number of tasks in the subspaces.
        scan: The sorted parameters, as of the last update.
        norm_statistics: Frozen norm statistics.
        version: Number that changes with the layers and their bases; a plan that was made for another one is outdated.
        places: Place of each parameter: the dict of its owner, and its name in there.
        is_temporary: Whether the weights are projected for an evaluation only and will be restored.
    """

    def __init__(self, model: nn.Module, scan: Scan) -> None:
        self.model = model
        self.tasks = 0
        self.scan = scan
        self.norm_statistics = FrozenNormStatistics()
        self.version = 0
        self.is_temporary = False
        self._fsdp_modules: list[nn.Module] = []
        self.bind()

    @property
    def layers(self) -> dict[str, ProtectedLayer]:
        """Protected layers by name."""
        return self.scan.layers

    @property
    def layers_with_bases(self) -> list[ProtectedLayer]:
        """Protected layers that have bases."""
        return [layer for layer in self.scan.layers.values() if layer.has_bases]

    @property
    def subspaces(self) -> dict[str, Bases]:
        """Bases and importances by layer."""
        return {name: layer.subspace for name, layer in self.layers.items() if layer.subspace is not None}

    @property
    def device(self) -> torch.device:
        """Device of the first protected weight."""
        weight = next(iter(self.layers.values())).weight
        return weight.tensor.device if weight.is_present else torch.device("cpu")

    @property
    def is_sharded(self) -> bool:
        """Whether the model is sharded, so that all processes must run its forward passes together."""
        return bool(self._fsdp_modules)

    def replace(self, tasks: int, scan: Scan) -> None:
        """Replace the layers and their subspaces by new ones, all at once."""
        known = {id(p.tensor): p for p in self.scan.parameters.values() if p.is_present}
        for parameter in scan.parameters.values():
            old = known.get(id(parameter.tensor))
            if old is not None:
                parameter.kept, parameter.master = old.kept, old.master
        place_subspaces(scan.layers.values())
        self.tasks, self.scan = tasks, scan
        self.version += 1
        self.bind()
        modules = {name: self.model.get_submodule(name) for name in scan.norm_modules} if tasks else {}
        self.norm_statistics.freeze(modules)

    def bind(self) -> None:
        """Find the parameters in the model as it is now, and move the bases to the devices of their weights."""
        for parameter in self.scan.parameters.values():
            parameter.bind(self.model)
        self.places = [(p.owner._parameters, p.leaf) for p in self.scan.parameters.values()]
        place_subspaces(self.layers.values())

    def find_shards(self) -> None:
        """Find the sharded modules, reshard them, and bind the parameters.

        A parameter that is sharded in a way that steps cannot project is a ``TypeError``.
        """
        self._fsdp_modules = find_fsdp_modules(self.model)
        self.reshard()
        self.bind()
        check_scan(self.scan, by_fsdp=self.is_sharded)

    def reshard(self) -> None:
        """Replace gathered parameters by their shards, which are the parameters of the optimizers."""
        reshard(self._fsdp_modules)

    def flush(self) -> None:
        """Project every change that is still to be projected."""
        self.reshard()
        with full_precision(self.device):
            for parameter in self.scan.parameters.values():
                if parameter.pending is not None:
                    parameter.pending.flush()

    def fingerprint(self) -> None:
        """Record the values of all protected and trainable frozen parameters."""
        protected = {p for layer in self.layers_with_bases for p in layer.parameters}
        for parameter in self.scan.parameters.values():
            is_tracked = parameter in protected or (
                parameter.name in self.scan.frozen and parameter.tensor.requires_grad
            )
            parameter.fingerprint = parameter.compute_fingerprint() if is_tracked else None
            parameter.is_stepped = False

    def check_not_temporary(self, consequence: str) -> None:
        """Raise if the weights are projected for an evaluation only.

        Args:
            consequence: Consequence of going on, for the message.

        Raises:
            RuntimeError: They are.
        """
        if self.is_temporary:
            raise RuntimeError(f"inside hook.projected(), {consequence}: leave the with block first")
