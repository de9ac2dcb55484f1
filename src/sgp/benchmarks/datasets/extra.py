"""Modules of the extras: imported where they are used, since the core does without them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# What the packages are called where they are installed from.
PACKAGES = {"sklearn": "scikit-learn", "PIL": "Pillow", "ale_py": "ale-py", "stable_baselines3": "stable-baselines3"}
# Which extra has them, unless it is "benchmarks".
EXTRAS = {"gymnasium": "rl", "ale_py": "rl", "stable_baselines3": "rl", "minatar": "minatar"}


def need(module: str) -> Any:
    """The module, imported; without it, an error that says what to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        top = module.partition(".")[0]
        package, extra = PACKAGES.get(top, top), EXTRAS.get(top, "benchmarks")
        raise ImportError(f'this needs {package}: pip install "sgp-torch[{extra}]"', name=top) from error
