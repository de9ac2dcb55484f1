"""Ctrl-C: while modules are imported the process ends at once, later the command cleans up first."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

# Exit code of a process that was interrupted, by the convention of shells.
INTERRUPTED = 130


def exit_on_interrupt() -> None:
    """Let Ctrl-C end the process with one line, without an exception.

    An exception that is raised inside the import of an extension module may come out as another one, or not at all.
    A process that ignores Ctrl-C, as one in the background of a script does, still ignores it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, for commands that have something to save."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(number: int, frame: object) -> NoReturn:
    os.write(2, b"sgp: interrupted\n")
    os._exit(INTERRUPTED)
