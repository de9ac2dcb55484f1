"""Kill a worker of a Ray cluster during a sweep; all runs must end bit-identical to runs on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from experiments.ray_cluster import SEEDS, lose_worker, start_cluster

SWEEPS = 3


def run(folder: Path, *, quick: bool, seed: int) -> dict[str, Any]:
    """Run sweeps on a cluster that loses a worker in each.

    Args:
        folder: Empty folder.
        quick: Whether to run one sweep only.
        seed: Unused, since the worker is killed when its run has reached a certain number of events.

    Returns:
        Figures of the campaign.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    faults, reached = [], []
    for number in range(1 if quick else SWEEPS):
        place = folder / str(number)
        place.mkdir()
        try:
            with start_cluster() as cluster:
                reached.append(lose_worker(cluster, place))
        except AssertionError as error:
            faults.append(f"sweep {number}: {error}")
    return {"sweeps": len(reached), "runs": len(SEEDS) * len(reached), "lost after events": reached, "faults": faults}
