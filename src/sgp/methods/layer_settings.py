"""Settings that have one value for all layers, or values by pattern on layer names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from sgp.patterns import check_patterns, find_pattern

T = TypeVar("T", int, float)
R = TypeVar("R")


def check_setting(network: nn.Module, name: str, setting: T | dict[str, T]) -> None:
    """Raise if a pattern of a setting matches nothing: now instead of after a task has been trained."""
    if isinstance(setting, dict):
        check_patterns(network, setting, name)


def list_values(setting: T | dict[str, T]) -> list[T]:
    """Return all values of a setting."""
    return list(setting.values()) if isinstance(setting, dict) else [setting]


def map_values(setting: T | dict[str, T], function: Callable[[T], R]) -> R | dict[str, R]:
    """Apply a function to each value of a setting."""
    if isinstance(setting, dict):
        return {pattern: function(value) for pattern, value in setting.items()}
    return function(setting)


def get_value(name: str, setting: T | dict[str, T], layer: str, default: T | None = None) -> T:
    """Return the value of a setting for one layer: the value of the first pattern that matches its name.

    Args:
        name: Name of the setting, for the error message.
        setting: One value, or values by pattern.
        layer: Name of the layer.
        default: Value for a layer that no pattern matches.

    Raises:
        ValueError: No pattern matches the layer, and there is no default.
    """
    if not isinstance(setting, dict):
        return setting
    pattern = find_pattern(layer, setting)
    if pattern is not None:
        return setting[pattern]
    if default is None:
        raise ValueError(f"{name}: no pattern matches the layer {layer!r}; add one, such as '*'")
    return default
