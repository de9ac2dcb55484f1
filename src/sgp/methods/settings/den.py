"""Settings and facts of den."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.methods.facts import MethodFacts
from sgp.settings import Settings, setting


@dataclass(frozen=True)
class DENSettings(Settings):
    """Settings of DEN: what a task retrains, and when the network grows."""

    l1: float = setting(1e-5, low=0)
    """Amount by which each step shrinks every trained weight. A weight that is no larger is no connection. A new head
    that is trained alone uses `head_l1` instead."""
    l2: float = setting(1e-4, low=0)
    """Weight decay of everything that is trained."""
    head_l1: float = setting(1e-5, low=0)
    """Amount by which each step shrinks the weights of a new head that is trained alone: the larger, the fewer units a
    task retrains."""
    drift: float = setting(0.5, low=0)
    """lambda of the penalty lambda/2 |theta - theta_{t-1}|^2 on what a task retrains, before and after a split."""
    loss_limit: float = setting(0.01, low=0)
    """Mean training loss above which a task adds units."""
    expand_units: int | dict[str, int] = setting(10, low=0)
    """Number of units that a task adds to each layer; or by pattern on layer names."""
    group_lasso: float = setting(0.001, low=0)
    """Amount by which each step shrinks the norm of each new unit's weights. Units whose weights are all 0 are
    removed."""
    split_limit: float = setting(0.05, low=0)
    """Norm of the change of a unit's weights above which the unit is split."""
    split_units: int | dict[str, int] = setting(10, low=0)
    """Largest number of units of each layer that a task splits; or by pattern on layer names."""
    split_choice: Literal["most", "least"] = "most"
    """Units to split if too many moved too far: those that moved most, or as in the published code those that moved
    least."""
    head_epochs: int = setting(5, low=1)
    """Number of epochs that a new head is trained alone."""
    expand_epochs: int = setting(5, low=1)
    """Number of epochs that new units are trained."""
    split_epochs: int = setting(5, low=1)
    """Number of epochs that the network is trained after a split."""


class DENFacts(MethodFacts):
    """Facts of :class:`sgp.methods.den.DEN`."""

    name = "den"
    description = "expandable network: tasks retrain useful units, add units if that fails, split units that moved far"
    Settings = DENSettings
    supervised_only = True
