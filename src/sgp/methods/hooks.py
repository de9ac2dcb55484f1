"""Hooks that do not keep their method alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def make_weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a bound method as long as its object is alive, and otherwise returns None.

    A hook that is a bound method would be a reference cycle, which keeps the network alive.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **options: Any) -> Any:
        bound = reference()
        return None if bound is None else bound(*args, **options)

    return call
