"""Streams of tasks with their protocol, and the metrics that are taken on them."""

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
BENCHMARKS.add("digits", digits.BENCHMARK)
BENCHMARKS.add("split-cifar100", split_cifar100.BENCHMARK)
BENCHMARKS.add("cifar100-superclass", superclass.BENCHMARK)
BENCHMARKS.add("split-miniimagenet", miniimagenet.BENCHMARK)
BENCHMARKS.add("permuted-mnist", permuted_mnist.BENCHMARK)
BENCHMARKS.add("five-datasets", five_datasets.BENCHMARK)
BENCHMARKS.add("clinc150", texts.CLINC150_BENCHMARK)
BENCHMARKS.add("fivetext", texts.FIVETEXT_BENCHMARK)
BENCHMARKS.add("atari", atari.BENCHMARK)
BENCHMARKS.add("minatar", minatar.BENCHMARK)

__all__ = ["BENCHMARKS", "Benchmark", "GameBenchmark"]
