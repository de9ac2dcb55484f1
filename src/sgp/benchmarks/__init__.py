"""Streams of tasks with their protocol, and the metrics that are measured on them.

Importing this package does not import torch.
"""

from sgp.benchmarks.settings import ALL, Benchmark, GameBenchmark
from sgp.registry import Registry

BENCHMARKS: Registry[Benchmark | GameBenchmark] = Registry("benchmark")
for _benchmark in ALL:
    BENCHMARKS.add(_benchmark.name, _benchmark)

__all__ = ["BENCHMARKS", "Benchmark", "GameBenchmark"]
