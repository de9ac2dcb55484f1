"""Format tables as files: CSV for programs, LaTeX for papers."""

from __future__ import annotations

import csv
import io

from sgp.report.tables import Cell, Table
from sgp.report.words import MINUS

LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "∞": r"$\infty$",
    MINUS: r"$-$",
    "“": "``",
    "”": "''",
}


def format_csv(table: Table) -> str:
    """Return a table as CSV. Every cell is quoted; numbers to sort by are in columns of their own."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    numeric = [any(row[place].value is not None for row in table.rows) for place in range(len(table.columns))]
    header = []
    for column, has_values in zip(table.columns, numeric, strict=True):
        header += [column.title, f"{column.title} as a number"] if has_values else [column.title]
    writer.writerow(header)
    for row in table.rows:
        cells: list[str] = []
        for cell, has_values in zip(row, numeric, strict=True):
            cells.append(_with_note(cell))
            if has_values:
                cells.append("" if cell.value is None else repr(cell.value))
        writer.writerow(cells)
    return text.getvalue()


def format_latex(table: Table) -> str:
    """Return a table as LaTeX, with the rules of booktabs."""
    sides = "".join("r" if column.numeric else "l" for column in table.columns)
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "\\centering",
        f"\\caption{{{escape_latex(table.title)}}}",
        f"\\begin{{tabular}}{{{sides}}}",
        "\\toprule",
        " & ".join(escape_latex(column.title) for column in table.columns) + r" \\",
        "\\midrule",
        *(" & ".join(escape_latex(_with_note(cell)) for cell in row) + r" \\" for row in table.rows),
        "\\bottomrule",
        "\\end{tabular}",
        "\\end{table}",
    ]
    return "\n".join(lines) + "\n"


def escape_latex(text: str) -> str:
    """Return a text escaped for LaTeX."""
    return "".join(LATEX.get(each, each) for each in text)


def _with_note(cell: Cell) -> str:
    return f"{cell.text} ({cell.note})".strip() if cell.note else cell.text
