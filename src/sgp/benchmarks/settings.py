"""Checks of the settings of benchmarks; an error names the setting, the value and what is accepted."""

from __future__ import annotations

from collections.abc import Sequence


def in_range(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raise unless a value is a whole number from `least` to `most`, or at least `least`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        accepted = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be a whole number {accepted}, got {value!r}")


def one_of(name: str, value: str, accepted: Sequence[str]) -> None:
    """Raise unless a value is one of the accepted words."""
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(accepted)}; got {value!r}")


def share(name: str, value: float) -> None:
    """Raise unless a value is a fraction in [0, 1)."""
    # Written so that NaN fails too.
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value!r}")


def seed(name: str, value: int | None) -> None:
    """Raise unless a value is a seed of NumPy, or None for the run's seed."""
    if value is not None:
        in_range(name, value, 0, 2**32 - 1)


def names(name: str, value: str) -> None:
    """Raise unless a value is a list of distinct names, separated by commas."""
    found = [part.strip() for part in value.split(",")]
    if not all(found) or len(set(found)) < len(found):
        raise ValueError(f"{name} must be different names with commas between them, got {value!r}")
