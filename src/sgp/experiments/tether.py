"""Run the command `sgp` in a process that ends with its parent: ``python -m sgp.experiments.tether ARGUMENTS``.

The parent holds the other end of the standard input and writes nothing. When the parent ends, however it ends, that end
is closed. A run loses nothing then, since it can be stopped at any moment.
"""

from __future__ import annotations

import os
import runpy
import sys
from threading import Thread

# Exit status of an interrupted process in a shell, as `sgp run` returns it.
INTERRUPTED = 130


def _exit_with_parent() -> None:
    # Not sys.stdin: a thread that reads it would hold its lock when the interpreter ends.
    while os.read(0, 1):
        pass
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    Thread(target=_exit_with_parent, daemon=True).start()
    sys.argv[0] = "sgp"
    runpy.run_module("sgp", run_name="__main__")
