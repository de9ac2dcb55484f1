"""Names and numbers as people read them."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from statistics import mean, stdev

BENCHMARKS = {
    "split-cifar100": "Split CIFAR-100",
    "cifar100-superclass": "CIFAR-100 Superclass",
    "split-miniimagenet": "Split miniImageNet",
    "five-datasets": "5-Datasets",
    "permuted-mnist": "Permuted MNIST",
    "digits": "Digits",
    "fivetext": "Five text tasks",
    "clinc150": "CLINC150",
    "atari": "Atari",
    "minatar": "MinAtar",
}
METHODS = {"er": "ER", "finetune": "Finetuning", "frozen": "Frozen", "lora": "LoRA", "multitask": "Multitask"}
MINUS = "\N{MINUS SIGN}"


def name_benchmark(name: str) -> str:
    """Return the name of a benchmark as in the paper's tables."""
    return BENCHMARKS.get(name, remove_control_characters(name))


def name_method(name: str) -> str:
    """Return the name of a method as in the paper's tables. Names of other packages are returned as they are."""
    from sgp.methods import METHODS as KNOWN

    ours = name in KNOWN and KNOWN[name].__module__.startswith("sgp.")
    return METHODS.get(name, name.upper() if ours else remove_control_characters(name))


def remove_control_characters(text: str) -> str:
    """Return a text of a user without characters that no page, table or figure can contain."""
    return "".join(" " if unicodedata.category(each) in ("Cc", "Cs", "Co", "Cn") else each for each in text)


def format_number(value: float, digits: int) -> str:
    """Return a number as text, with a typographical minus and without a minus before a zero."""
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("-", MINUS)


def format_signed(value: float, digits: int) -> str:
    """Return a number as text with its sign, also if it is positive."""
    text = format_number(value, digits)
    return text if text.startswith(MINUS) or float(text) == 0 else f"+{text}"


def format_deviation(value: float, deviation: float | None, digits: int) -> str:
    """Return a number and its standard deviation, if there is one, as text."""
    return format_number(value, digits) + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def format_spread(values: Sequence[float], digits: int) -> str:
    """Return mean and sample standard deviation as text. A single value has no deviation."""
    return format_deviation(mean(values), stdev(values) if len(values) > 1 else None, digits)


def format_count(amount: int, noun: str) -> str:
    """Return an amount with its noun in the singular or plural."""
    return f"{amount} {noun}{'s' * (amount != 1)}"


def format_size(amount: float) -> str:
    """Return a number of bytes as text."""
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def format_value(value: object) -> str:
    """Return the value of a setting as text."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {format_value(item)}" for key, item in value.items())
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return remove_control_characters(str(value))
