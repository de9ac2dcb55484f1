"""``python -m sgp.experiments.tether ARGUMENTS``: the command `sgp` in a process that ends with whoever started it.

The one who starts it holds the other end of its standard input, writes nothing, and need not even know that it dies:
its end is closed then, however it ended. A run loses nothing by that, since it can be stopped at any moment.
"""

from __future__ import annotations

import os
import runpy
import sys
from threading import Thread

# What a shell makes of a process that was interrupted, as `sgp run` does.
INTERRUPTED = 130


def _watch() -> None:
    # Not sys.stdin, whose lock a reading thread would hold when the interpreter ends.
    while os.read(0, 1):
        pass
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    Thread(target=_watch, daemon=True).start()
    sys.argv[0] = "sgp"
    runpy.run_module("sgp", run_name="__main__")
