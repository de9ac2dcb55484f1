"""Setting of the C library's memory allocator for training on a CPU."""

from __future__ import annotations

import ctypes
import sys

# Options of mallopt, from malloc.h, and their values in bytes.
TRIM_THRESHOLD = -1, 256 << 20
MMAP_THRESHOLD = -3, 32 << 20


def keep_freed_memory() -> None:
    """Let the process keep up to 256 MiB of freed memory, so that each step reuses the pages of the previous one.

    By default glibc returns large blocks to the kernel, and the next step faults them in again: thousands of pages in
    a step of AlexNet. Results do not change. Other C libraries have no such setting, and nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option in (TRIM_THRESHOLD, MMAP_THRESHOLD):
            mallopt(*option)
