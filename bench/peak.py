"""Peak memory of an update as the samples grow, each in a process of its own: ``python -m bench.peak 512``."""

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sgp
from bench.row import Row

BATCH = 64
# Of each layer of the network below: rows per sample and their length.
ROWS = {"conv1": (32 * 32, 27), "conv2": (16 * 16, 144), "fc": (1, 512)}


class Images:
    """Batches of smooth random images, made as they are asked for, so that the data itself takes no room."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples // BATCH

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(len(self)):
            coarse = torch.randn(BATCH, 3, 8, 8, generator=generator)
            yield F.interpolate(coarse, size=(32, 32), mode="bilinear")


def network() -> nn.Sequential:
    """Two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 16, kernel_size=3, padding=1, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 128, bias=False),
    )


def peak(samples: int) -> int:
    """Bytes by which an update raises this process's resident memory at its highest."""
    model = network()
    memory = sgp.GradientMemory(model, threshold=0.97, alpha=10)
    with torch.no_grad():
        model(next(iter(Images(BATCH))))
    before = _forget_the_peak()
    memory.update(Images(samples))
    return _peak() - before


def _forget_the_peak() -> int:
    """Return the resident bytes; on Linux, also reset the peak that the kernel records."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _peak()
    return _status("VmRSS")


def _peak() -> int:
    # Not ru_maxrss on Linux: a child inherits its parent's through exec.
    if Path("/proc/self/status").exists():
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def rows(base: int = 512, processes: int = 3) -> list[Row]:
    """Measure the peak at 1, 4 and 16 times the samples, as ratios to the first.

    Beside it stand the bytes of the matrices R that the published procedure holds before its first SVD.
    """
    out: list[Row] = []
    for factor in (1, 4, 16):
        samples = base * factor
        peaks = sorted(_peak_in_a_new_process(samples) for _ in range(processes))
        held = sum(samples * rows * d * (8 if name != "fc" else 4) for name, (rows, d) in ROWS.items())
        middle = peaks[len(peaks) // 2]
        first = out[0].amounts["sgp"] if out else middle
        out.append(
            Row(
                name=f"Peak memory of an update, {samples} samples",
                unit="bytes",
                amounts={"sgp": middle, "published": held},
                against=f"{base} samples",
                ratio=middle / first,
                published_ratio=float(factor),
                goal=1.1 if factor > 1 else None,
                detail={"peaks": peaks, "published": "size of R alone, computed"},
            )
        )
    return out


def _peak_in_a_new_process(samples: int) -> int:
    # With glibc's moving threshold freed buffers stay in the heap by chance; with a fixed one they are
    # given back, and the peak is what was in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run(
        [sys.executable, "-m", "bench.peak", str(samples)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    return int(json.loads(run.stdout)["peak"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("samples", type=int)
    print(json.dumps({"peak": peak(parser.parse_args().samples)}))
