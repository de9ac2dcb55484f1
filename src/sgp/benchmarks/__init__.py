"""Streams of tasks with their protocol, and the metrics that are measured on them."""

from sgp.benchmarks import (
    atari,
    digits,
    five_datasets,
    minatar,
    miniimagenet,
    permuted_mnist,
    split_cifar100,
    superclass,
    texts,
)
from sgp.benchmarks.benchmark import Benchmark, GameBenchmark
from sgp.registry import Registry

BENCHMARKS: Registry[Benchmark | GameBenchmark] = Registry("benchmark")
for _benchmark in (
    digits.BENCHMARK,
    split_cifar100.BENCHMARK,
    superclass.BENCHMARK,
    miniimagenet.BENCHMARK,
    permuted_mnist.BENCHMARK,
    five_datasets.BENCHMARK,
    texts.CLINC150_BENCHMARK,
    texts.FIVETEXT_BENCHMARK,
    atari.BENCHMARK,
    minatar.BENCHMARK,
):
    BENCHMARKS.add(_benchmark.name, _benchmark)

__all__ = ["BENCHMARKS", "Benchmark", "GameBenchmark"]
