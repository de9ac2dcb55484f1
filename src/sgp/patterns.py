"""Match qualified names of modules and parameters against patterns as in ``fnmatch``."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn


def find_pattern(name: str, patterns: Iterable[str]) -> str | None:
    """Return the first pattern that matches a qualified name or one of the modules that contain it."""
    parts = name.split(".")
    ancestry = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return next((p for p in patterns if any(fnmatchcase(prefix, p) for prefix in ancestry)), None)


def check_patterns(model: nn.Module, patterns: Iterable[str], setting: str, extra_names: Iterable[str] = ()) -> None:
    """Raise if a pattern matches nothing, unless it begins with the name of an existing module that is still empty.

    Args:
        model: Module whose module and parameter names the patterns refer to.
        patterns: Patterns to check.
        setting: Name of the setting that holds the patterns, for the error message.
        extra_names: Further names that a pattern may match.

    Raises:
        ValueError: A pattern matches no name.
    """
    modules = {name for name, _ in model.named_modules()}
    names = modules | {name for name, _ in model.named_parameters(remove_duplicate=False)} | set(extra_names)
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        literal = pattern.split("*")[0].split("?")[0].split("[")[0].rstrip(".")
        if literal and literal in modules:
            continue
        known = ", ".join(sorted(name for name in modules if name)[:12])
        raise ValueError(f"{setting}: the pattern {pattern!r} matches no module or parameter; the model has {known}")
