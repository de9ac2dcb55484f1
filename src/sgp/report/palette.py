"""Colours and markers: a pair for each method, the same in all figures, distinguishable by colour-blind people.

Figures are drawn in the light colours. On the page each colour is a CSS variable, which has a value for dark pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32


@dataclass(frozen=True)
class Colour:
    """A colour.

    Attributes:
        light: Value on a light page.
        dark: Value on a dark page.
    """

    light: str
    dark: str


# After Okabe and Ito, and Tol: contrast of at least 3 to 1 against both pages.
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

# Colours of tasks and layers, from first to last.
RAMP = (
    Colour("#b07d12", "#e0b04c"),
    Colour("#7f8420", "#b9bd5a"),
    Colour("#2f8762", "#6cc79e"),
    Colour("#1b7489", "#5fc0d4"),
    Colour("#255893", "#86b2ea"),
    Colour("#332e74", "#b3aef5"),
)
# In the order of their numbers on the page.
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


def choose_look(method: str) -> tuple[Colour, str]:
    """Return colour and marker of a method. An unknown method gets a pair that depends only on its name."""
    if method in METHODS:
        return METHODS[method]
    code = crc32(method.encode())
    return ALL[code % 9], MARKERS[code // 9 % len(MARKERS)]


def choose_ramp_colour(position: int, amount: int) -> Colour:
    """Return the colour of a position, from 0, in a row of an amount of tasks or layers."""
    return RAMP[round(position * (len(RAMP) - 1) / max(1, amount - 1))]
