"""Draw the figure of the README from committed runs: ``python -m bench.figure``.

It shows, for each method on five text tasks, how well a task is learned against how much of it is forgotten.
"""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import mean, stdev

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "results" / "runs"
OUT = ROOT / "docs" / "images"
SEEDS = (1, 2, 3)
# Method, label, and the label's offset from its point in typographic points.
METHODS = {
    "sgp": ("SGP", (8, 7)),
    "gpm": ("GPM", (7, -14)),
    "ewc": ("EWC", (9, 4)),
    "osf": ("OSF", (9, -12)),
    "er": ("ER (stores data)", (9, -12)),
    "lora": ("LoRA", (8, -13)),
    "frozen": ("frozen encoder", (9, -3)),
    "finetune": ("finetuning", (8, -14)),
}
# Text and lines, other methods, SGP.
THEMES = {"light": ("#333333", "#8a8f98", "#3f51b5"), "dark": ("#dddddd", "#8a8f98", "#8c9eff")}


def read_learned_and_forgotten(method: str) -> tuple[list[float], list[float]]:
    """Return two values for each seed, in percent points.

    Returns:
        Mean accuracy of the tasks right after each was learned, and how much lower it is at the end, over all tasks but
        the last one.
    """
    learned, forgotten = [], []
    for seed in SEEDS:
        with (RUNS / f"fivetext-{method}-seed{seed}" / "accuracy.csv").open(encoding="utf-8", newline="") as file:
            rows = [[float(cell) for cell in row[1:] if cell] for row in list(csv.reader(file))[1:]]
        first = [row[task] for task, row in enumerate(rows)]
        learned.append(mean(first))
        forgotten.append(mean(a - b for a, b in zip(first[:-1], rows[-1][:-1], strict=True)))
    return learned, forgotten


def draw(theme: str) -> Path:
    """Draw the figure for a light or a dark page, and return its path."""
    ink, other, ours = THEMES[theme]
    mpl.rcParams["svg.hashsalt"] = "sgp"  # the same bytes each time
    figure, axes = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    for method, (label, offset) in METHODS.items():
        learned, forgotten = read_learned_and_forgotten(method)
        color = ours if method == "sgp" else other
        x, y = mean(forgotten), mean(learned)
        axes.errorbar(
            x, y, stdev(learned), stdev(forgotten), fmt="o", ms=8 if method == "sgp" else 6, color=color, lw=1
        )
        axes.annotate(
            label,
            (x, y),
            offset,
            textcoords="offset points",
            color=ink,
            fontsize=10,
            fontweight="bold" if method == "sgp" else "normal",
            ha="right" if offset[0] < 0 else "left",
        )
    axes.set_xlabel("forgotten at the end of five tasks (points)", color=ink)
    axes.set_ylabel("accuracy when learned (%)", color=ink)
    arrow = {"arrowstyle": "->", "color": ink}
    axes.annotate("better", (0.012, 0.95), (0.085, 0.81), "axes fraction", "axes fraction", arrow, color=ink)
    axes.set_ylim(75.5, 83.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(ink)
    axes.tick_params(colors=ink)
    path = OUT / f"five-text-tasks-{theme}.svg"
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)
    return path


if __name__ == "__main__":
    for theme in THEMES:
        print(draw(theme).relative_to(ROOT))
