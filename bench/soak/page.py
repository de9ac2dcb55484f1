"""The page docs/reliability.md, made from the figures of a campaign: ``python -m bench.soak.page``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIGURES, PAGE = ROOT / "results" / "soak.json", ROOT / "docs" / "reliability.md"
MARKED = re.compile("(<!-- made by python -m bench.soak.page -->\n).*(<!-- end -->\n)", re.S)


def make_page(text: str, report: dict[str, Any]) -> str:
    """Return the page with the figures of a campaign.

    Args:
        text: Text of the page.
        report: Figures of the campaign.
    """
    parts, versions = report["parts"], report["versions"]
    described = {
        "tasks": _describe_tasks(parts["tasks"]),
        "kills": _describe_kills(parts["kills"]),
        "damage": _describe_damage(parts["damage"]),
        "sweep": _describe_sweep(parts["sweep"]),
        "disk": _describe_disk(parts["disk"]),
    }
    rows = [
        f"| {name} | {done} | {found} | {len(parts[name]['faults'])} | {parts[name]['seconds'] / 60:.0f} |"
        for name, (done, found) in described.items()
    ]
    named = ", ".join(f"{name} {versions[name]}" for name in ("sgp", "python", "torch", "numpy", "safetensors", "ray"))
    lines = [
        "",
        "| part | test | result | faults | minutes |",
        "| --- | --- | --- | ---: | ---: |",
        *rows,
        "",
        f"Command: `{report['command']}`, with seed {parts['tasks']['seed']}, one thread, {named}.",
        "",
    ]
    return MARKED.sub(lambda match: match[1] + "\n".join(lines) + match[2], text)


def _describe_tasks(figures: dict[str, Any]) -> tuple[str, str]:
    ways = {"a loop": figures["loop"], "the trainer": figures["trainer"]}
    found = [
        f"{name}: {way['at half']['resident']} MiB and {way['at half']['handles']} file handles after half of the "
        f"tasks, {way['at the end']['resident']} MiB and {way['at the end']['handles']} at the end"
        for name, way in ways.items()
    ]
    return f"{figures['tasks']} tasks in a row, in {' and in '.join(ways)}", "; ".join(found)


def _describe_kills(figures: dict[str, Any]) -> tuple[str, str]:
    runs = figures["killed runs"]
    kinds = " and ".join(f"{len(methods)} methods with the {trainer} trainer" for trainer, methods in runs.items())
    return f"{figures['kills']} kills of runs of {kinds}", "every run ended bit-identical to one that was not killed"


def _describe_damage(figures: dict[str, Any]) -> tuple[str, str]:
    kinds = ("memory files", "configs", "run folders")
    counts = ", ".join(f"{sum(figures[kind].values())} {kind}" for kind in kinds)
    accepted = ", ".join(f"{figures[kind]['accepted']} {kind}" for kind in kinds)
    return (
        f"{figures['files']:,} damaged files: {counts}",
        f"loaded: {accepted}; all others refused with a one-line error",
    )


def _describe_sweep(figures: dict[str, Any]) -> tuple[str, str]:
    events = ", ".join(map(str, figures["lost after events"]))
    return (
        f"{figures['sweeps']} sweeps on Ray that each lost a worker, after {events} events",
        f"all {figures['runs']} runs ended bit-identical to runs on one machine",
    )


def _describe_disk(figures: dict[str, Any]) -> tuple[str, str]:
    memories, runs = figures["memories"], figures["runs"]
    return (
        f"{memories['saves']} saves of a memory and {runs['runs']} runs on a full disk ({figures['disk']})",
        f"{memories['failures']} saves and {runs['failures']} starts failed, and nothing was lost",
    )


if __name__ == "__main__":
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    PAGE.write_text(make_page(PAGE.read_text(encoding="utf-8"), figures), encoding="utf-8")
