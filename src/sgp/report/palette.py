"""Colours and markers: one of each for every method, the same in all figures, told apart by colour-blind people too.

Figures are drawn in the light colours. On the page each of them is a CSS variable, so that it has a dark form.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32


@dataclass(frozen=True)
class Colour:
    """A colour on white, and its form on a dark page."""

    light: str
    dark: str


# After Okabe and Ito, and Tol: at least 3 to 1 against the page in both forms.
BLUE = Colour("#0b62a8", "#5aa9e6")
ORANGE = Colour("#b85500", "#f0954a")
GREEN = Colour("#00795a", "#3fbf95")
PURPLE = Colour("#8e3d87", "#d18acb")
CYAN = Colour("#1d7fa3", "#6cc7e6")
RED = Colour("#b3312c", "#f0837c")
OLIVE = Colour("#7d6a00", "#cdb94a")
BROWN = Colour("#7a4a2b", "#c79a78")
GREY = Colour("#6b6f76", "#a3a8b0")
INK = Colour("#1c1f24", "#e8eaed")
MUTED = Colour("#5d636b", "#a6adb6")
GRID = Colour("#dfe2e6", "#33383f")
PAGE = Colour("#fefefe", "#15181c")
ALL = (BLUE, ORANGE, GREEN, PURPLE, CYAN, RED, OLIVE, BROWN, GREY, INK, MUTED, GRID, PAGE)

# From early to late, from light to dark; for tasks and for layers.
RAMP = (
    Colour("#b07d12", "#e0b04c"),
    Colour("#7f8420", "#b9bd5a"),
    Colour("#2f8762", "#6cc79e"),
    Colour("#1b7489", "#5fc0d4"),
    Colour("#255893", "#86b2ea"),
    Colour("#332e74", "#b3aef5"),
)
# Numbered as they are on the page.
EVERY = (*ALL, *RAMP)

METHODS = {
    "sgp": (BLUE, "o"),
    "gpm": (ORANGE, "s"),
    "trgp": (GREEN, "^"),
    "fs-dgpm": (PURPLE, "D"),
    "ewc": (CYAN, "v"),
    "hat": (RED, "P"),
    "er": (OLIVE, "X"),
    "a-gem": (BROWN, "<"),
    "finetune": (GREY, "o"),
    "multitask": (INK, "*"),
    "stl": (INK, "h"),
    "owm": (OLIVE, ">"),
    "si": (CYAN, "p"),
    "der": (BROWN, "d"),
    "blip": (RED, "H"),
    "pnn": (GREEN, "8"),
    "den": (PURPLE, "v"),
    "rcl": (ORANGE, "P"),
    "apd": (BROWN, "s"),
    "frozen": (INK, "s"),
    "lora": (RED, "^"),
    "osf": (PURPLE, "P"),
}
MARKERS = "osD^v<>PX"


def of_method(method: str) -> tuple[Colour, str]:
    """Colour and marker; a method that is not known gets some by its name, so always the same."""
    if method in METHODS:
        return METHODS[method]
    code = crc32(method.encode())
    return ALL[code % 9], MARKERS[code // 9 % len(MARKERS)]


def ramp(position: int, amount: int) -> Colour:
    """The colour of the one at a position, from 0, of an amount in a row."""
    return RAMP[round(position * (len(RAMP) - 1) / max(1, amount - 1))]
