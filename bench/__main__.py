"""Steps, updates and peak memory, measured side by side: ``python -m bench``.

One table at the end, everything that was measured as JSON. ``OMP_NUM_THREADS`` sets the threads of both
torch and numpy. On a machine that is busy with something else set it to 1: the small decompositions of an
update wait for each other's threads at every step, and can take a hundred times as long.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import epoch, methods, peak, rl, small, steps, texts, update, wide
from bench.machine import describe_machine
from bench.row import Row, as_ratio

MEASUREMENTS = ("alexnet", "epoch", "methods", "ppo", "resnet18", "rl", "small", "texts", "update", "wide", "peak")


def table(rows: list[Row], where: dict[str, object]) -> Table:
    """Build a table of the rows that fits in 80 columns."""
    day = str(where["date"])[:10]
    view = Table(
        title="Side by side: plain, with sgp, and as published",
        caption=f"{where['cpu']}, {where['threads']} threads, torch {where['torch']}, {day}, "
        f"load before: {where['load']}\n"
        "Ratios are medians over interleaved rounds. Steps are divided by the plain\n"
        "step, those of methods by GPM's, epochs and updates by the published ones,\n"
        "peaks by the first peak.",
        caption_justify="left",
    )
    view.add_column("measured", max_width=24)
    for column in ("plain", "sgp", "published", "ratio", "publ.", "goal"):
        view.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        amounts = [_amount(row.amounts.get(way), row.unit) for way in ("plain", "sgp", "published")]
        style = {True: "green", False: "red", None: ""}[row.met]
        ratio = f"[{style}]{as_ratio(row.ratio)}[/]" if style else as_ratio(row.ratio)
        view.add_row(row.name, *amounts, ratio, as_ratio(row.published_ratio), as_ratio(row.goal))
    return view


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "bytes":
        return f"{value / 2**20:.0f} MiB"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that were measured again in the places of the old ones, and further ones after those."""
    again = {row["name"]: row for row in new}
    kept = [again.pop(row["name"], row) for row in old]
    return [*kept, *again.values()]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: sooner, and noisier")
    parser.add_argument("--out", type=Path, help="write everything that was measured to this JSON file")
    parser.add_argument(
        "--only", choices=MEASUREMENTS, nargs="+", help="measure only these; others stay in the JSON file"
    )
    arguments = parser.parse_args()
    wanted = arguments.only or MEASUREMENTS
    quick = arguments.quick

    # Taken before the measurements, which are a load of their own.
    where = describe_machine()
    measurements: dict[str, tuple[str, Callable[[], list[Row]]]] = {
        "alexnet": ("AlexNet step", lambda: [steps.alexnet_row(rounds=5 if quick else 25)]),
        "epoch": ("epoch", lambda: [epoch.row(rounds=1 if quick else 5)]),
        "methods": ("steps of all methods", lambda: methods.rows(rounds=2 if quick else 7)),
        "ppo": ("PPO step", lambda: [steps.ppo_row(rounds=3 if quick else 12)]),
        "resnet18": ("ResNet-18 step", lambda: [steps.resnet18_row(rounds=3 if quick else 15)]),
        "rl": ("PPO on Atari", lambda: rl.rows(rounds=1 if quick else 3)),
        "small": ("steps of small networks", lambda: small.rows(rounds=20 if quick else 200)),
        "texts": ("MiniLM steps", lambda: texts.rows(rounds=1 if quick else 5)),
        "update": ("memory update", lambda: update.rows(rounds=1 if quick else 3)),
        "wide": ("updates of wide layers", lambda: wide.rows(rounds=1 if quick else 3)),
        "peak": ("peak memory", lambda: peak.rows(processes=1 if quick else 3)),
    }
    kept: list[dict[str, Any]] = []
    if arguments.only and arguments.out is not None and arguments.out.exists():
        kept = json.loads(arguments.out.read_text())["rows"]
    progress = Console(stderr=True)
    rows: list[Row] = []
    for name in wanted:
        what, measure = measurements[name]
        progress.print(f"measuring {what} ...")
        rows += measure()
        if arguments.out is not None:
            made = [asdict(row) | {"met": row.met, "date": where["date"]} for row in rows]
            report = where | {"quick": quick, "rows": merged(kept, made)}
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    console = Console(width=80)
    console.print(table(rows, where))
    for row in rows:
        if row.note:
            console.print(f"{row.name}: {row.note}", highlight=False)


if __name__ == "__main__":
    main()
