"""Draw the figure of a page of the gallery: the score of each task while one after another is learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from bench.figure import THEMES

FOLDER = Path(__file__).parents[2] / "docs" / "images" / "gallery"


def draw(
    name: str,
    history: Mapping[str, Sequence[Sequence[float]]],
    tasks: Mapping[str, tuple[int, int]],
    *,
    score: str,
    time: str,
    decimals: int = 0,
) -> None:
    """Draw a panel for each task, in a light and a dark theme, and print the last scores.

    Args:
        name: Name of the figure's files.
        history: Scores of all tasks at each time, for each method; the last method is emphasized.
        tasks: Times at which the training on each task begins and ends.
        score: Name of the score.
        time: Name of the unit of time.
        decimals: Number of decimals of the last scores.
    """
    for method, scores in history.items():
        lasts = zip(tasks, scores[-1], strict=True)
        print(f"{method:<12}", "  ".join(f"{task}: {last:.{decimals}f}" for task, last in lasts))
    everything = [value for scores in history.values() for row in scores for value in row]
    margin = 0.08 * (max(everything) - min(everything))
    plt.rcParams.update({"svg.hashsalt": "sgp", "svg.fonttype": "none"})  # the same bytes each time, and real text
    for theme, (ink, other, ours) in THEMES.items():
        figure, panels = plt.subplots(1, len(tasks), figsize=(7.2, 2.6), sharey=True, layout="constrained")
        panels[0].set_ylim(min(everything) - margin, max(everything) + margin)
        panels[0].set_ylabel(score, color=ink)
        for index, (panel, (task, span)) in enumerate(zip(panels, tasks.items(), strict=True)):
            panel.axvspan(*span, color=ours, alpha=0.12, lw=0)
            lines = {method: [row[index] for row in scores] for method, scores in history.items()}
            _draw_lines(panel, index, lines, span[0], [other] * (len(lines) - 1) + [ours], f".{decimals}f", ink)
            panel.set_title(task, color=ink, fontsize=10)
            panel.set_xlabel(time, color=ink)
            panel.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
            panel.spines[["top", "right"]].set_visible(False)
            panel.spines[["left", "bottom"]].set_color(ink)
            panel.tick_params(colors=ink)
        legend = panels[0].get_legend_handles_labels()
        figure.legend(*legend, loc="outside lower center", ncols=len(history), frameon=False, labelcolor=ink)
        FOLDER.mkdir(parents=True, exist_ok=True)
        figure.savefig(FOLDER / f"{name}-{theme}.svg", transparent=True, metadata={"Date": None})
        plt.close(figure)


def _draw_lines(
    panel: Axes,
    index: int,
    lines: Mapping[str, Sequence[float]],
    begin: int,
    colors: Sequence[str],
    form: str,
    ink: str,
) -> None:
    """Draw lines from a time on, each labeled with its last value, and move labels that would overlap."""
    low, high = panel.get_ylim()
    ends = [values[-1] for values in lines.values()]
    are_close = max(ends) - min(ends) < 0.1 * (high - low)
    for (method, values), color in zip(lines.items(), colors, strict=True):
        last = len(values) - 1
        panel.plot(range(begin, last + 1), values[begin:], color=color, lw=2, label=method)
        shift = 0 if not are_close else 5 if values[-1] == max(ends) else -5
        style: dict[str, Any] = {"textcoords": "offset points", "color": ink, "fontsize": 9, "va": "center"}
        text = panel.annotate(f"{values[-1]:{form}}", (last, values[-1]), (4, shift), **style)
        text.set_gid(f"last-{method}-{index}")
        panel.set_xlim(0, last * 1.16)
