"""Imports that wait until a name is used, so that the command line starts without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pkgutil import resolve_name
from typing import Any


def load_lazily(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports some of its names when they are asked for.

    Args:
        package: Name of the package.
        modules: Module that each name is imported from; the package itself for its submodules.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if modules[name] == package:
            return import_module(f"{package}.{name}")
        return getattr(import_module(modules[name]), name)

    return __getattr__


class Deferred:
    """Function whose module is imported at the first call.

    Args:
        target: Module and function, as in "sgp.networks.mlp:build_mlp".
    """

    def __init__(self, target: str) -> None:
        self.target = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return resolve_name(self.target)(*args, **kwargs)
