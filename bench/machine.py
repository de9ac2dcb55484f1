"""The machine that numbers were taken on."""

import datetime
import os
import platform
from pathlib import Path

import numpy as np
import torch


def find_processor() -> str:
    """Return the processor's model name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_machine() -> dict[str, object]:
    """Return where and when numbers are taken."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": find_processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "load": round(os.getloadavg()[0], 2),
    }
