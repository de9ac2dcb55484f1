"""Modules of the extra "benchmarks": imported where they are used, since the core does without them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# What the packages are called where they are installed from.
PACKAGES = {"sklearn": "scikit-learn", "PIL": "Pillow", "scipy": "scipy", "pooch": "pooch"}


def need(module: str) -> Any:
    """The module, imported; without it, an error that says what to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        top = module.partition(".")[0]
        raise ImportError(f'this needs {PACKAGES[top]}: pip install "sgp-torch[benchmarks]"', name=top) from error
