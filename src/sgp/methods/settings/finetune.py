"""Settings and facts of finetune."""

from __future__ import annotations

from sgp.methods.facts import MethodFacts


class FinetuneFacts(MethodFacts):
    """Facts of :class:`sgp.methods.finetune.Finetune`."""

    name = "finetune"
    description = "plain training on one task after another: the lower bound"
