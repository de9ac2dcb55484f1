"""Streams of tasks with their protocol, and the metrics that are measured on them.

Importing this package does not import torch.
"""

from sgp.benchmarks.atari import BENCHMARK as ATARI
from sgp.benchmarks.benchmark import Benchmark, GameBenchmark
from sgp.benchmarks.minatar import BENCHMARK as MINATAR
from sgp.benchmarks.settings.digits import BENCHMARK as DIGITS
from sgp.benchmarks.settings.five_datasets import BENCHMARK as FIVE_DATASETS
from sgp.benchmarks.settings.miniimagenet import BENCHMARK as SPLIT_MINIIMAGENET
from sgp.benchmarks.settings.permuted_mnist import BENCHMARK as PERMUTED_MNIST
from sgp.benchmarks.settings.split_cifar100 import BENCHMARK as SPLIT_CIFAR100
from sgp.benchmarks.settings.superclass import BENCHMARK as SUPERCLASS
from sgp.benchmarks.settings.texts import CLINC150_BENCHMARK, FIVETEXT_BENCHMARK
from sgp.registry import Registry

BENCHMARKS: Registry[Benchmark | GameBenchmark] = Registry("benchmark")
for _benchmark in (
    DIGITS,
    SPLIT_CIFAR100,
    SUPERCLASS,
    SPLIT_MINIIMAGENET,
    PERMUTED_MNIST,
    FIVE_DATASETS,
    CLINC150_BENCHMARK,
    FIVETEXT_BENCHMARK,
    ATARI,
    MINATAR,
):
    BENCHMARKS.add(_benchmark.name, _benchmark)

__all__ = ["BENCHMARKS", "Benchmark", "GameBenchmark"]
