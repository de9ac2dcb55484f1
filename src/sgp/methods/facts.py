"""Facts of methods, which are available before a method's module, and torch with it, is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class NoSettings:
    """Settings of a method that has none."""


class MethodFacts:
    """Facts of a method: its name, its settings, and what it can do.

    Attributes:
        name: Name in the registry and on the command line.
        description: One line for `sgp list methods`.
        Settings: Frozen dataclass of the method's settings; their values on each benchmark are in sgp.paper.
        keeps_data: Whether the method stores examples of old tasks.
        supervised_only: Whether the method changes the loss, the batch or the forward pass.
        projects_steps: Whether a gradient memory projects the optimizer's steps.
        trains_jointly: Whether all tasks are learned at once. An epoch then goes through all of them, and each batch
            comes from one task.
        rounds_weights: Whether `consolidate` changes the weights, so that nothing can be fitted to them before it.
        packages: Packages beside torch that the method's numbers depend on; a run records their versions.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    Settings: ClassVar[type[Any]] = NoSettings
    keeps_data: ClassVar[bool] = False
    supervised_only: ClassVar[bool] = False
    projects_steps: ClassVar[bool] = False
    trains_jointly: ClassVar[bool] = False
    rounds_weights: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = ()
