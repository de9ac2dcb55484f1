"""Checks that the settings of several benchmarks share; an error names the setting, the value and what is accepted."""

from __future__ import annotations

from collections.abc import Sequence


def in_range(name: str, value: int, least: int, most: int | None = None) -> None:
    """A whole number from `least` to `most`, or from `least` up."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        accepted = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be a whole number {accepted}, got {value!r}")


def one_of(name: str, value: str, accepted: Sequence[str]) -> None:
    """One of some words."""
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(accepted)}; got {value!r}")


def share(name: str, value: float) -> None:
    """A share or a probability that leaves something."""
    # Written so that NaN fails too.
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value!r}")


def seed(name: str, value: int | None) -> None:
    """A seed of numpy's generator, or None for the run's own."""
    if value is not None:
        in_range(name, value, 0, 2**32 - 1)


def names(name: str, value: str) -> None:
    """Names with commas between them, none of them twice."""
    found = [part.strip() for part in value.split(",")]
    if not all(found) or len(set(found)) < len(found):
        raise ValueError(f"{name} must be different names with commas between them, got {value!r}")
