"""Kinds of plots. Each is data that can be drawn, described point by point, and written as a table.

A drawing has the height of its figure in inches. `draw` draws it into axes of matplotlib and returns the description of
each point of a group of marks, by the id of the group; `header` and `values` are a table of all values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sgp.report import palette, words
from sgp.report.palette import Colour

# Axes of matplotlib, which need not be installed while types are checked.
Axes = Any
# Largest number of tasks with numbers in the cells of a heat map; above it the cells are too small.
MOST_NUMBERS = 12
# Lines of more points have markers too small to see, which only respond to the pointer.
MANY_POINTS = 40
# Line styles of the second and later lines of one colour: a method with several settings.
LINE_STYLES: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))


@dataclass(frozen=True)
class Series:
    """Points with a name.

    Attributes:
        label: Label in the legend.
        xs: Positions of the points.
        ys: Values of the points.
        colour: Colour of line and markers.
        marker: Marker of matplotlib.
        deviations: Standard deviations of the points, if they are means.
        line: Line style that joins the points; empty for none.
        notes: Notes on each point.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: Colour
    marker: str = "o"
    deviations: Sequence[float] = ()
    line: str = "-"
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Lines:
    """Series over an axis.

    Attributes:
        series: Series to draw.
        x: Title of the horizontal axis.
        y: Title of the vertical axis.
        digits: Digits of the values in descriptions.
        ticks: Labels of positions on the horizontal axis.
        log_x: Whether the horizontal axis is logarithmic.
        log_y: Whether the vertical axis is logarithmic.
        levels: Name, value and colour of each dashed horizontal line.
        height: Height of the figure in inches.
    """

    series: Sequence[Series]
    x: str
    y: str
    digits: int = 1
    ticks: dict[float, str] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False
    levels: Sequence[tuple[str, float, Colour]] = ()
    height: float = 2.6

    def draw(self, axes: Axes) -> dict[str, list[str]]:
        """Draw into axes, and return the descriptions of points."""
        tips = {}
        looks: list[tuple[Colour, str, str]] = []
        for number, each in enumerate(self.series):
            many = len(each.xs) > MANY_POINTS
            looks.append((each.colour, each.marker, each.line))
            repetition = looks.count(looks[-1]) - 1
            (line,) = axes.plot(
                each.xs,
                each.ys,
                linestyle=LINE_STYLES[repetition % len(LINE_STYLES)] if each.line == "-" else each.line or "none",
                color=each.colour.light,
                marker=each.marker,
                markersize=1.5 if many else 4.5 if each.line else 8,
                markeredgecolor=palette.PAGE.light,
                markeredgewidth=0 if many else 0.6,
                label=each.label,
            )
            line.set_gid(f"mark-{number}")
            if len(each.deviations):
                low = [y - d for y, d in zip(each.ys, each.deviations, strict=True)]
                high = [y + d for y, d in zip(each.ys, each.deviations, strict=True)]
                axes.fill_between(each.xs, low, high, color=each.colour.light, alpha=0.14, linewidth=0)
            tips[f"mark-{number}"] = [self._describe(each, point) for point in range(len(each.xs))]
        for name, level, colour in self.levels:
            axes.axhline(level, color=colour.light, linestyle=(0, (4, 3)), linewidth=1, label=name)
        axes.set_xlabel(self.x)
        axes.set_ylabel(self.y)
        for is_log, scale, axis in (
            (self.log_x, axes.set_xscale, axes.xaxis),
            (self.log_y, axes.set_yscale, axes.yaxis),
        ):
            if is_log:
                scale("log")
                # The default labels are formulas, which are not parsed here.
                axis.set_major_formatter(lambda value, _: f"{value:g}")
                axis.set_minor_formatter(lambda value, _: "")
        if self.ticks:
            axes.set_xticks(list(self.ticks), list(self.ticks.values()))
            axes.minorticks_off()
        elif not self.log_x:
            axes.locator_params(axis="x", nbins=6)  # numbers of several digits would touch
        return tips

    def _format_x(self, value: float) -> str:
        return self.ticks.get(value, f"{value:g}")

    def _format_y(self, value: float, deviation: float | None = None) -> str:
        if self.log_y:
            return f"{value:.3g}" + ("" if deviation is None else f" ± {deviation:.{self.digits}f}")
        return words.format_deviation(value, deviation, self.digits)

    def _describe(self, each: Series, point: int) -> str:
        note = f"; {each.notes[point]}" if each.notes else ""
        return f"{each.label}; {self.x} {self._format_x(each.xs[point])}: {self._format_point(each, point)}{note}"

    def _format_point(self, each: Series, point: int) -> str:
        return self._format_y(each.ys[point], each.deviations[point] if len(each.deviations) else None)

    def header(self) -> list[str]:
        """Return the titles of the columns of the values."""
        return ["", self.x, self.y]

    def values(self) -> list[list[str]]:
        """Return all values in rows."""
        rows = [
            [each.label, self._format_x(x), self._format_point(each, point)]
            for each in self.series
            for point, x in enumerate(each.xs)
        ]
        return rows + [[name, "", self._format_y(level)] for name, level, _ in self.levels]


@dataclass(frozen=True)
class Bar:
    """A bar.

    Attributes:
        label: Label beside the bar.
        value: Length of the bar.
        colour: Colour of the bar.
        deviation: Standard deviation of the value.
        published: Value of the paper, which is marked on the bar.
    """

    label: str
    value: float
    colour: Colour
    deviation: float = 0.0
    published: float | None = None


@dataclass(frozen=True)
class Bars:
    """Horizontal bars, the first on top.

    Attributes:
        bars: Bars to draw.
        x: Title of the axis.
        digits: Digits of the values in descriptions.
        baseline: Value of a dashed line.
    """

    bars: Sequence[Bar]
    x: str
    digits: int = 2
    baseline: float | None = None

    @property
    def height(self) -> float:
        """Height of the figure in inches."""
        return 0.8 + 0.26 * len(self.bars)

    def draw(self, axes: Axes) -> dict[str, list[str]]:
        """Draw into axes, and return the descriptions of points."""
        tips = {}
        places = [-number for number in range(len(self.bars))]
        for number, (place, bar) in enumerate(zip(places, self.bars, strict=True)):
            error: dict[str, Any] = {"xerr": bar.deviation, "error_kw": _ERROR} if bar.deviation else {}
            (patch,) = axes.barh(place, bar.value, height=0.62, color=bar.colour.light, linewidth=0, **error)
            patch.set_gid(f"mark-{number}")
            tips[f"mark-{number}"] = [self._describe(bar)]
        marked = {
            place: bar.published for place, bar in zip(places, self.bars, strict=True) if bar.published is not None
        }
        if marked:
            mark = {"linestyle": "none", "marker": "|", "markersize": 13, "markeredgewidth": 2, "label": "paper"}
            axes.plot(list(marked.values()), list(marked), color=palette.INK.light, **mark)
        if self.baseline is not None:
            axes.axvline(self.baseline, color=palette.MUTED.light, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_yticks(places, [bar.label for bar in self.bars])
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(self.x)
        axes.grid(visible=False, axis="y")
        return tips

    def _format_bar(self, bar: Bar) -> str:
        return words.format_deviation(bar.value, bar.deviation or None, self.digits)

    def _describe(self, bar: Bar) -> str:
        text = f"{bar.label}: {self._format_bar(bar)}"
        return f"{text}; paper {bar.published:.{self.digits}f}" if bar.published is not None else text

    def header(self) -> list[str]:
        """Return the titles of the columns of the values."""
        return ["", self.x, "paper"] if any(bar.published is not None for bar in self.bars) else ["", self.x]

    def values(self) -> list[list[str]]:
        """Return all values in rows."""
        width = len(self.header())
        return [
            [
                bar.label,
                self._format_bar(bar),
                "" if bar.published is None else f"{bar.published:.{self.digits}f}",
            ][:width]
            for bar in self.bars
        ]


@dataclass(frozen=True)
class Heat:
    """The lower triangle of a matrix: rows after each task, columns for each task.

    Attributes:
        matrix: Rows, of which row i has i entries, from 1.
        names: Names of the tasks.
        limits: Values of the first and the last colour, the same for all matrices that are compared.
        height: Height of the figure in inches.
    """

    matrix: Sequence[Sequence[float]]
    names: Sequence[str]
    limits: tuple[float, float]
    height: float = 3.2

    def draw(self, axes: Axes) -> dict[str, list[str]]:
        """Draw into axes, and return the descriptions of points."""
        from matplotlib import colormaps
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize
        from matplotlib.patches import Rectangle

        low, high = self.limits
        colours, tips = colormaps["cividis"], {}
        for after, row in enumerate(self.matrix):
            for task, value in enumerate(row):
                shade = (value - low) / (high - low) if high > low else 1.0
                cell = Rectangle((task, after), 1, 1, facecolor=colours(shade), edgecolor=palette.PAGE.light, lw=0.6)
                cell.set_gid(f"mark-{after}-{task}")
                axes.add_patch(cell)
                tips[f"mark-{after}-{task}"] = [
                    f"{self._name_task(task)} after {self._name_task(after)}: {value:.1f} %"
                ]
                if len(self.matrix) <= MOST_NUMBERS:
                    ink = "#000001" if shade > 0.55 else "#fffffe"
                    axes.text(task + 0.5, after + 0.5, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=8)
        size = len(self.matrix)
        if size > MOST_NUMBERS:
            shades = ScalarMappable(Normalize(low, high if high > low else low + 1), colours)
            bar = axes.figure.colorbar(shades, ax=axes, shrink=0.6, aspect=25)
            bar.outline.set_visible(False)
        step = 1 if size <= MOST_NUMBERS else 5
        shown = [number for number in range(1, size + 1) if number == 1 or number % step == 0]
        axes.set_xlim(0, size)
        axes.set_ylim(size, 0)
        axes.set_aspect("equal")
        for ticks in (axes.set_xticks, axes.set_yticks):
            ticks([number - 0.5 for number in shown], [str(number) for number in shown])
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.set_xlabel("accuracy on task (%)")
        axes.set_ylabel("after learning task")
        return tips

    def _name_task(self, task: int) -> str:
        name = self.names[task]
        return name if name.startswith("task ") else f"task {task + 1} ({name})"

    def header(self) -> list[str]:
        """Return the titles of the columns of the values."""
        return ["after", *(str(number) for number in range(1, len(self.matrix) + 1))]

    def values(self) -> list[list[str]]:
        """Return all values in rows."""
        width = len(self.matrix)
        return [
            [self._name_task(after), *(f"{value:.1f}" for value in row), *[""] * (width - len(row))]
            for after, row in enumerate(self.matrix)
        ]


_ERROR: dict[str, Any] = {"ecolor": palette.INK.light, "elinewidth": 1.0, "capsize": 2}


@dataclass(frozen=True)
class Figure:
    """A figure of the report.

    Attributes:
        name: Name of the figure's files.
        title: Heading.
        drawing: Content of the figure.
        caption: What a reader should know.
        section: Part of the page that the figure belongs to.
        benchmark: Benchmark that the figure belongs to.
    """

    name: str
    title: str
    drawing: Lines | Bars | Heat
    caption: str = ""
    section: str = ""
    benchmark: str = ""
