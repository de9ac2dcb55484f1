"""Tables of runs, and the runs of the main table that follow from those that chose the settings.

python -m bench.smollm2.table results/smollm2            # means over seeds
python -m bench.smollm2.table selection --choose         # commands with the best settings of each method
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

Run = dict[str, Any]
SEEDS = range(3)
# Options that tell the trials of a method apart, beside its learning rate.
TRIED = ("threshold", "alpha", "share", "strength")
# Methods that are run with the chosen settings of another one, as its controls.
CONTROLS = {"sgp": "random-bases", "finetune": "frozen-norms"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, or commands."""
    parser = argparse.ArgumentParser(prog="python -m bench.smollm2.table", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--choose", action="store_true", help="print the runs of the main table")
    parser.add_argument("--out", default="results/smollm2", help="their folder")
    options = parser.parse_args(arguments)
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(options.folder.glob("*.json"))]
    print("\n".join(list_commands(runs, options.out)) if options.choose else make_table(runs))


def make_table(runs: Sequence[Run]) -> str:
    """Return a Markdown table with the mean and the standard deviation over seeds, a row for each setting."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_describe(run, runs), []).append(run)
    rises = [f"rise: {name}" for name in runs[0]["rise"]]
    columns = ["method", "seeds", "accuracy (%)", "loss of the answers", *rises, "kept (MB)", "step (s)"]
    lines = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    for name, members in groups.items():
        cells = [
            _format([100 * compute_accuracy(run) for run in members], 1),
            _format([mean(task["loss"] for task in run["tasks"].values()) for run in members], 3),
            *(_format([run["rise"][text] for run in members], 3, sign="+") for text in runs[0]["rise"]),
            f"{mean(run['bytes'] for run in members) / 1e6:.1f}",
            f"{mean(run['step_seconds'] for run in members):.2f}",
        ]
        lines.append(f"| {name} | {len(members)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def list_commands(runs: Sequence[Run], out: str) -> list[str]:
    """Return the commands of the main table, with the settings that did best in the runs that chose them.

    The best trial of a method has the highest accuracy minus the rise of the loss on held-out self-sampled text. The
    general English of the main table has no part in the choice.
    """
    best: dict[str, Run] = {}
    for run in runs:
        method = _name_row(run)
        if method not in best or _score(run) > _score(best[method]):
            best[method] = run
    commands = []
    for run in best.values():
        method = run["method"]
        settings = " ".join(f"--{name} {run['options'][name]}" for name in ("lr", *TRIED, "steps"))
        for each in (method, CONTROLS.get(method)):
            if each is not None:
                commands.append(f"python -m bench.smollm2 {each} {settings} --test --out {out}")
    return [f"{command} --seed {seed}" for seed in SEEDS for command in commands]


def compute_accuracy(run: Run) -> float:
    """Return the mean accuracy over the tasks of a run."""
    return float(mean(task["accuracy"] for task in run["tasks"].values()))


def _score(run: Run) -> float:
    return compute_accuracy(run) - float(run["rise"]["self-sampled"])


def _name_row(run: Run) -> str:
    """Return what settings are chosen for: a method, or replay of a share of texts."""
    return f"replay {run['settings']['share']}" if run["method"] == "replay" else str(run["method"])


def _describe(run: Run, runs: Sequence[Run]) -> str:
    """Return the method of a run with the options in which the runs of this method differ."""
    others = [other["options"] for other in runs if other["method"] == run["method"]]
    differing = [name for name in ("lr", *TRIED) if any(other[name] != run["options"][name] for other in others)]
    return ", ".join([run["method"], *(f"{name} {run['options'][name]}" for name in differing)])


def _format(values: Sequence[float], digits: int, sign: str = "") -> str:
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):{sign}.{digits}f}{spread}"


if __name__ == "__main__":
    main()
