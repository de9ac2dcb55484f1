"""Settings and facts of den."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgp.methods.facts import MethodFacts
from sgp.settings import Settings, setting


@dataclass(frozen=True)
class DENSettings(Settings):
    """What of the network a task retrains, and when it grows."""

    l1: float = setting(1e-5, low=0)
    """Amount by which each step shrinks every weight that it trains. A weight that is no larger is no
    connection. A new head that is trained alone has `head_l1` instead."""
    l2: float = setting(1e-4, low=0)
    """Weight decay of everything that is trained."""
    head_l1: float = setting(1e-5, low=0)
    """What each step takes off the size of a new head's weights while it is trained alone: the larger, the
    fewer units a task retrains."""
    drift: float = setting(0.5, low=0)
    """lambda of the penalty lambda/2 |theta - theta_{t-1}|^2 on what a task retrains, before and after a split."""
    loss_limit: float = setting(0.01, low=0)
    """Mean training loss above which a task adds units."""
    expand_units: int | dict[str, int] = setting(10, low=0)
    """How many it adds to each layer; or by pattern on layer names."""
    group_lasso: float = setting(0.001, low=0)
    """What each step takes off the norm of each new unit's weights. Units without any are removed."""
    split_limit: float = setting(0.05, low=0)
    """How far the weights of a unit may move, as a norm, before it is split."""
    split_units: int | dict[str, int] = setting(10, low=0)
    """At most so many units of each layer are split in a task; or by pattern on layer names."""
    split_choice: Literal["most", "least"] = "most"
    """Which of those that moved too far are split, if they are too many: the ones that moved most, or as in the
    published code those that moved least."""
    head_epochs: int = setting(5, low=1)
    """How long a new head is trained alone."""
    expand_epochs: int = setting(5, low=1)
    """How long new units are trained."""
    split_epochs: int = setting(5, low=1)
    """How long the task is trained after a split."""


class DENFacts(MethodFacts):
    """Facts of :class:`sgp.methods.den.DEN`."""

    name = "den"
    description = "expandable network: tasks retrain what they can use, add units where that fails, split what drifted"
    Settings = DENSettings
    supervised_only = True
