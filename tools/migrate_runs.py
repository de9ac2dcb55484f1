"""Bring the config files of runs of earlier versions to the settings that there are now.

    python tools/migrate_runs.py results/runs/*

A setting that was renamed gets its new name. A setting that was removed is dropped where it had its inactive value. A
run in which it was active keeps it; such a run stays readable, and cannot be resumed. Nothing but ``config.yaml`` is
written, so tables and metrics stay as they are.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from sgp.storage import write_bytes

CONFIG = "config.yaml"
# Settings that were removed, with the value at which they did nothing.
REMOVED: dict[str, Any] = {"processes": 1, "project_again": 0.0}

# Settings that were renamed, by their old names.
RENAMED = {"old_share": "interpolation_weight", "statistics": "norm_statistics"}


def migrate_config(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run by their present names, without those that were removed and did nothing."""
    kept = {name: value for name, value in values.items() if name not in REMOVED or value != REMOVED[name]}
    return {RENAMED.get(name, name): value for name, value in kept.items()}


def migrate_folder(folder: Path) -> bool:
    """Rewrite the config of a run if it needs to be, and return whether it did."""
    path = folder / CONFIG
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    migrated = migrate_config(values)
    if migrated == values:
        return False
    write_bytes(path, yaml.safe_dump(migrated, sort_keys=False).encode())
    return True


def main(folders: list[str]) -> None:
    """Migrate the folders of a command line."""
    for folder in map(Path, folders):
        if migrate_folder(folder):
            print(f"{folder}: migrated")


if __name__ == "__main__":
    main(sys.argv[1:])
