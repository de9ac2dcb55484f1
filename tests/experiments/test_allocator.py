"""Freed memory stays in the process, so that no step faults it in again."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
from sgp.experiments.allocator import keep_freed_memory

def count_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        blocks = [torch.ones(4 << 20) for _ in range(4)]  # 16 MiB each
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

count_faults()
before = count_faults()
keep_freed_memory()
count_faults()
print(before, count_faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is one of glibc")
def test_memory_is_faulted_in_only_once() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True)
    before, after = map(int, done.stdout.split())
    if before < 5 * 4096:  # at least one block in each round, in pages of 4 KiB
        pytest.skip("the system keeps freed memory here by itself")
    assert after < 0.1 * before
