"""Settings and facts of multitask."""

from __future__ import annotations

from sgp.methods.facts import MethodFacts


class MultitaskFacts(MethodFacts):
    """Facts of :class:`sgp.methods.multitask.Multitask`."""

    name = "multitask"
    description = "all tasks at once in one network: the upper bound"
    # Data of all tasks are needed to the end.
    keeps_data = True
    supervised_only = True
    trains_jointly = True
