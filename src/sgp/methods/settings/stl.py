"""Settings and facts of stl."""

from __future__ import annotations

from sgp.methods.facts import MethodFacts


class STLFacts(MethodFacts):
    """Facts of :class:`sgp.methods.stl.STL`."""

    name = "stl"
    description = "single-task learning: a network of its own for each task"
    supervised_only = True
