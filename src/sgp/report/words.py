"""What things are called for people, and how numbers are written."""

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


def benchmark(name: str) -> str:
    """Of the paper's tables."""
    return BENCHMARKS.get(name, clean(name))


def method(name: str) -> str:
    """Of the paper's tables; names of other packages stay as they are."""
    from sgp.methods import METHODS as KNOWN

    ours = name in KNOWN and KNOWN[name].__module__.startswith("sgp.")
    return METHODS.get(name, name.upper() if ours else clean(name))


def clean(text: str) -> str:
    """Something that a user named, without what no page, table or figure can hold."""
    return "".join(" " if unicodedata.category(each) in ("Cc", "Cs", "Co", "Cn") else each for each in text)


def number(value: float, digits: int) -> str:
    """With a real minus, and no minus before a zero."""
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("-", MINUS)


def signed(value: float, digits: int) -> str:
    """With its sign, whichever it is."""
    text = number(value, digits)
    return text if text.startswith(MINUS) or float(text) == 0 else f"+{text}"


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and sample standard deviation; one value has none."""
    text = number(mean(values), digits)
    return f"{text} ± {stdev(values):.{digits}f}" if len(values) > 1 else text


def count(amount: int, noun: str) -> str:
    return f"{amount} {noun}{'s' * (amount != 1)}"


def size(amount: float) -> str:
    """Bytes for people to read."""
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def plain(value: object) -> str:
    """The value of a setting."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items())
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return clean(str(value))
