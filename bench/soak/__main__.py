"""Reliability campaign: ``make soak``, or ``python -m bench.soak`` with the folder ``tests`` on ``PYTHONPATH``.

Each part prints its figures and faults, which ``--out`` also writes to a JSON file. The exit code is 1 if there is any
fault.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from bench.machine import describe_machine
from bench.soak import damage, disk, kills, sweep, tasks
from sgp.experiments.folder import GAME_PACKAGES, collect_versions


class Part(Protocol):
    """Function that runs a part of the campaign and returns its figures, with the list of its "faults"."""

    def __call__(self, folder: Path, *, quick: bool, seed: int) -> dict[str, Any]: ...


PARTS: dict[str, Part] = {
    "tasks": tasks.run,
    "kills": kills.run,
    "damage": damage.run,
    "sweep": sweep.run,
    "disk": disk.run,
}


def run_part(name: str, *, quick: bool, seed: int) -> dict[str, Any]:
    """Run a part of the campaign in an empty folder, and return its figures, its wall time and the date."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sgp-soak-") as folder:
        figures = PARTS[name](Path(folder), quick=quick, seed=seed)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"seed": seed, **figures, "seconds": round(time.monotonic() - begun), "date": date}


def main() -> int:
    """Run the campaign, print its figures, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="run a few tasks, kills and files of each kind")
    parser.add_argument("--only", choices=PARTS, nargs="+", help="run only these parts; others stay in the JSON file")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything that is random; default: 0")
    parser.add_argument("--out", type=Path, help="JSON file of the figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"parts": {}}
    if arguments.only and arguments.out is not None and arguments.out.exists():
        report = json.loads(arguments.out.read_text(encoding="utf-8"))
    report |= {
        "command": "make soak",
        **describe_machine(),
        "versions": collect_versions("ray", *GAME_PACKAGES),
        "quick": arguments.quick,
    }
    failed = False
    for name in arguments.only or PARTS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        figures = run_part(name, quick=arguments.quick, seed=arguments.seed)
        report["parts"][name] = figures
        print(json.dumps({name: figures}, indent=1), flush=True)
        failed = failed or bool(figures["faults"])
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
