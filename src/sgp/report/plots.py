"""Kinds of plots: each is data that can be drawn, told point by point, and written out as a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sgp.report import palette, words
from sgp.report.palette import Colour

# Of matplotlib, which need not be installed while types are checked.
Axes = Any
# Above so many tasks the cells of a heat map are too small for numbers.
MOST_NUMBERS = 12
# A line of more points has markers too small to see, so that they only answer to the pointer.
MANY_POINTS = 40
# Lines of one method with several settings have one colour.
AGAIN: tuple[Any, ...] = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))


class Drawing(ABC):
    """What is drawn inside the axes of a figure."""

    height: float = 2.6
    """Of the figure, in inches."""

    @abstractmethod
    def draw(self, axes: Axes) -> dict[str, list[str]]:
        """Draw it; what each point of a group of marks is, by the group's id."""

    @abstractmethod
    def header(self) -> list[str]:
        """Of the values as a table."""

    @abstractmethod
    def values(self) -> list[list[str]]:
        """All values, in rows."""


@dataclass(frozen=True)
class Series:
    """Points with a name.

    Attributes:
        label: in the legend.
        xs: of the points.
        ys: of the points.
        colour: of them.
        marker: of them.
        deviations: of the points, if they are means.
        line: how they are joined; empty for not at all.
        notes: more to say of each point.
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
class Lines(Drawing):
    """Series over an axis.

    Attributes:
        series: of them.
        x: title of the axis.
        y: title of the axis.
        digits: of the values that are told.
        ticks: names of positions on the axis.
        log_x: whether the axis is logarithmic.
        log_y: whether the axis is logarithmic.
        levels: dashed lines across, by name.
        height: of the figure.
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
        tips = {}
        looks: list[tuple[Colour, str, str]] = []
        for number, each in enumerate(self.series):
            many = len(each.xs) > MANY_POINTS
            looks.append((each.colour, each.marker, each.line))
            again = looks.count(looks[-1]) - 1
            (line,) = axes.plot(
                each.xs,
                each.ys,
                linestyle=AGAIN[again % len(AGAIN)] if each.line == "-" else each.line or "none",
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
            tips[f"mark-{number}"] = [self._tip(each, point) for point in range(len(each.xs))]
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
                # The usual labels are formulas, which are not read here.
                axis.set_major_formatter(lambda value, _: f"{value:g}")
                axis.set_minor_formatter(lambda value, _: "")
        if self.ticks:
            axes.set_xticks(list(self.ticks), list(self.ticks.values()))
            axes.minorticks_off()
        elif not self.log_x:
            axes.locator_params(axis="x", nbins=6)  # numbers of several digits would touch
        return tips

    def _x(self, value: float) -> str:
        return self.ticks.get(value, f"{value:g}")

    def _y(self, value: float) -> str:
        return f"{value:.3g}" if self.log_y else words.number(value, self.digits)

    def _tip(self, each: Series, point: int) -> str:
        text = f"{each.label}; {self.x} {self._x(each.xs[point])}: {self._y(each.ys[point])}"
        if len(each.deviations):
            text += f" ± {each.deviations[point]:.{self.digits}f}"
        return f"{text}; {each.notes[point]}" if each.notes else text

    def header(self) -> list[str]:
        return ["", self.x, self.y]

    def values(self) -> list[list[str]]:
        rows = []
        for each in self.series:
            for point, (x, y) in enumerate(zip(each.xs, each.ys, strict=True)):
                deviation = f" ± {each.deviations[point]:.{self.digits}f}" if len(each.deviations) else ""
                rows.append([each.label, self._x(x), self._y(y) + deviation])
        return rows + [[name, "", self._y(level)] for name, level, _ in self.levels]


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes:
        label: beside it.
        value: how long it is.
        colour: of it.
        deviation: of the value.
        published: the paper's value, marked on it.
    """

    label: str
    value: float
    colour: Colour
    deviation: float = 0.0
    published: float | None = None


@dataclass(frozen=True)
class Bars(Drawing):
    """Bars that lie, the first on top.

    Attributes:
        bars: of them.
        x: title of the axis.
        digits: of the values that are told.
        baseline: where a line is drawn.
    """

    bars: Sequence[Bar]
    x: str
    digits: int = 2
    baseline: float | None = None

    @property
    def height(self) -> float:  # type: ignore[override]
        return 0.8 + 0.26 * len(self.bars)

    def draw(self, axes: Axes) -> dict[str, list[str]]:
        tips = {}
        places = [-number for number in range(len(self.bars))]
        for number, (place, bar) in enumerate(zip(places, self.bars, strict=True)):
            error: dict[str, Any] = {"xerr": bar.deviation, "error_kw": _ERROR} if bar.deviation else {}
            (patch,) = axes.barh(place, bar.value, height=0.62, color=bar.colour.light, linewidth=0, **error)
            patch.set_gid(f"mark-{number}")
            tips[f"mark-{number}"] = [self._tip(bar)]
        marked = [
            (place, bar.published) for place, bar in zip(places, self.bars, strict=True) if bar.published is not None
        ]
        if marked:
            axes.plot(
                [value for _, value in marked],
                [place for place, _ in marked],
                linestyle="none",
                marker="|",
                markersize=13,
                markeredgewidth=2,
                color=palette.INK.light,
                label="paper",
            )
        if self.baseline is not None:
            axes.axvline(self.baseline, color=palette.MUTED.light, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_yticks(places, [bar.label for bar in self.bars])
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(self.x)
        axes.grid(visible=False, axis="y")
        return tips

    def _tip(self, bar: Bar) -> str:
        text = f"{bar.label}: {words.number(bar.value, self.digits)}"
        text += f" ± {bar.deviation:.{self.digits}f}" if bar.deviation else ""
        return f"{text}; paper {bar.published:.{self.digits}f}" if bar.published is not None else text

    def header(self) -> list[str]:
        return ["", self.x, "paper"] if any(bar.published is not None for bar in self.bars) else ["", self.x]

    def values(self) -> list[list[str]]:
        wide = len(self.header()) == 3
        rows = []
        for bar in self.bars:
            deviation = f" ± {bar.deviation:.{self.digits}f}" if bar.deviation else ""
            row = [bar.label, words.number(bar.value, self.digits) + deviation]
            published = "" if bar.published is None else f"{bar.published:.{self.digits}f}"
            rows.append([*row, published] if wide else row)
        return rows


@dataclass(frozen=True)
class Heat(Drawing):
    """The lower triangle of a matrix: rows after each task, columns for each task.

    Attributes:
        matrix: rows, each as long as its number.
        names: of the tasks.
        limits: values of the first and the last colour, the same for all that are compared.
        height: of the figure.
    """

    matrix: Sequence[Sequence[float]]
    names: Sequence[str]
    limits: tuple[float, float]
    height: float = 3.2

    def draw(self, axes: Axes) -> dict[str, list[str]]:
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
                tips[f"mark-{after}-{task}"] = [f"{self._name(task)} after {self._name(after)}: {value:.1f} %"]
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

    def _name(self, task: int) -> str:
        name = self.names[task]
        return name if name.startswith("task ") else f"task {task + 1} ({name})"

    def header(self) -> list[str]:
        return ["after", *(str(number) for number in range(1, len(self.matrix) + 1))]

    def values(self) -> list[list[str]]:
        width = len(self.matrix)
        return [
            [self._name(after), *(f"{value:.1f}" for value in row), *[""] * (width - len(row))]
            for after, row in enumerate(self.matrix)
        ]


_ERROR: dict[str, Any] = {"ecolor": palette.INK.light, "elinewidth": 1.0, "capsize": 2}


@dataclass(frozen=True)
class Figure:
    """A figure of the report.

    Attributes:
        name: of its files.
        title: above it.
        drawing: what is in it.
        caption: what a reader should know.
        section: which part of the page it belongs to.
        benchmark: that it belongs to.
    """

    name: str
    title: str
    drawing: Drawing
    caption: str = ""
    section: str = ""
    benchmark: str = ""
