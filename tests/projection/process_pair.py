"""Run a script in two processes that communicate with each other."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from waiting import CEILING


def run_processes(script: str, out: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return the contents of ``OUT/RANK.json`` after running ``script OUT ARGUMENTS...`` in two processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-W", "ignore", script, str(out), *arguments]
    with ExitStack() as stack:
        running = []
        for rank in range(2):
            each = subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
            running.append(stack.enter_context(each))
            stack.callback(each.kill)  # if the other process has failed, this one would wait forever
        for each in running:
            _, errors = each.communicate(timeout=CEILING)
            assert each.returncode == 0, errors
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]
