"""Warnings that point at the user's line, however deep inside a training loop they arise."""

from __future__ import annotations

import sys
import warnings

# Frames of these packages stand between the user's line and a warning.
INTERNAL = ("sgp.", "torch.", "contextlib", "functools")


def warn_caller(message: str) -> None:
    """Warn with the innermost line that is neither of this package nor of torch."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(INTERNAL):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, stacklevel=depth)
