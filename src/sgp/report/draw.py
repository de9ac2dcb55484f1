"""Draw figures as files for papers, and as SVG for the page, with the page's colours and a title for each value."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from sgp.report import palette
from sgp.report.plots import Figure

WIDTH = 4.0
STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.edgecolor": palette.MUTED.light,
    "axes.labelcolor": palette.MUTED.light,
    "axes.linewidth": 0.6,
    # Transparent, so that the page's background shows through.
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": palette.GRID.light,
    "grid.linewidth": 0.6,
    "xtick.color": palette.MUTED.light,
    "ytick.color": palette.MUTED.light,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "text.color": palette.INK.light,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.6,
    # Names of users are not formulas.
    "text.parse_math": False,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "savefig.dpi": 200,
}
SVG = "http://www.w3.org/2000/svg"
LEGEND_COLUMNS = 4
# Metadata by suffix, without the date, so that equal figures are equal files.
FORMATS: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "png": {}, "svg": {"Date": None}}


def draw(figure: Figure) -> dict[str, bytes]:
    """Draw a figure.

    Args:
        figure: Figure to draw.

    Returns:
        Content of the file of each format, by suffix. The SVG is for the page.
    """
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    style: Any = STYLE | {"svg.hashsalt": figure.name}
    with matplotlib.rc_context(style), warnings.catch_warnings():
        # A name may have characters that the font lacks; browsers show them.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing")
        canvas = Canvas(figsize=(WIDTH, figure.drawing.height), layout="constrained")
        axes = canvas.add_subplot()
        tips = figure.drawing.draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        if len(handles) > 1 or labels == ["paper"]:
            longest = max(map(len, labels))
            columns = max(1, min(LEGEND_COLUMNS, len(labels), 54 // (longest + 5)))
            rows = -(-len(labels) // columns)
            canvas.set_figheight(figure.drawing.height + 0.18 * rows)
            canvas.legend(handles, labels, loc="outside lower center", ncols=columns)
        # Once for all formats, because it takes most of the time.
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")
        files = {}
        for kind, about in FORMATS.items():
            target = io.BytesIO()
            canvas.savefig(target, format=kind, metadata=about, facecolor="none" if kind == "svg" else "white")
            files[kind] = target.getvalue()
    files["svg"] = _adapt_to_page(files["svg"], figure.name, tips)
    return files


def _adapt_to_page(svg: bytes, name: str, tips: Mapping[str, list[str]]) -> bytes:
    """Return an SVG for the page: no metadata, colours of the page, unique ids, a title for each value."""
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(svg)
    for child in root.findall(f"{{{SVG}}}metadata"):
        root.remove(child)
    for attribute in ("width", "height"):
        del root.attrib[attribute]
    # The figure around the drawing has a name and a table of the values.
    root.set("aria-hidden", "true")
    groups = {element.get("id"): element for element in root.iter(f"{{{SVG}}}g")}
    for gid, texts in tips.items():
        for mark, text in zip(_find_marks(groups.get(gid)), texts, strict=True):
            mark.set("class", "mark")
            ElementTree.SubElement(mark, f"{{{SVG}}}title").text = text
    for element in root.iter():
        for attribute, value in element.attrib.items():
            if attribute == "id":
                element.set(attribute, f"{name}-{value}")
            elif attribute in ("style", "clip-path") or attribute.endswith("href"):
                element.set(attribute, _replace_references(value, name))
    return ElementTree.tostring(root)


def _replace_references(value: str, name: str) -> str:
    """Return an attribute with references to ids of this figure, and variables of the page as colours."""
    value = re.sub(r"(url\(#|^#(?=[a-z]\w{8}))", rf"\g<1>{name}-", value)
    for number, colour in enumerate(palette.EVERY):
        value = value.replace(colour.light, f"var(--c{number})")
    return value


def _find_marks(group: ElementTree.Element | None) -> list[ElementTree.Element]:
    """Return the elements of a group that stand for single values: markers of a line, or the only patch."""
    if group is None:
        return []
    uses = list(group.iter(f"{{{SVG}}}use"))
    return uses or list(group.iter(f"{{{SVG}}}path"))[-1:]
