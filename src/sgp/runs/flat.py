"""Settings in groups that have one flat list of names, as in files and on the command line."""

from __future__ import annotations

import dataclasses
from typing import Any

# Fields of a config that are dataclasses of settings themselves.
GROUPS = ("stream", "training", "settings")


class Flat:
    """What the configs of all kinds of runs share; each is a dataclass with the fields of GROUPS and more."""

    stream: object
    training: object
    settings: object

    def flat(self) -> dict[str, Any]:
        """Every setting by its name, as on the command line."""
        values: dict[str, Any] = {}
        for group in (self, self.stream, self.training, self.settings):
            for entry in dataclasses.fields(group):  # type: ignore[arg-type]
                if entry.name not in GROUPS:
                    values[entry.name] = getattr(group, entry.name)
        return values
