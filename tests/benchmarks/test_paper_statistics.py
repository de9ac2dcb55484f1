"""The paper's table of data set statistics, on the real data where $SGP_DATA has them."""

from pathlib import Path

import pytest
import torch

from sgp.benchmarks import BENCHMARKS
from sgp.benchmarks.datasets.images import MissingData

# Tasks, input size, classes a task, and training, validation and test images a task.
STATISTICS = {
    "split-cifar100": (10, (3, 32, 32), 10, 4750, 250, 1000),
    "cifar100-superclass": (20, (3, 32, 32), 5, 2375, 125, 500),
    "split-miniimagenet": (20, (3, 84, 84), 5, 2375, 125, 500),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STATISTICS)
def test_streams_have_the_statistics_of_the_paper(name: str, real_data: Path) -> None:
    tasks, inputs, classes, train, validation, test = STATISTICS[name]
    benchmark = BENCHMARKS[name]
    try:
        stream = benchmark.stream(benchmark.settings(), real_data, 0)
    except MissingData as missing:
        pytest.skip(f"not all real data sets are there: {missing}")
    assert (len(stream), stream.inputs) == (tasks, inputs)
    seen = set()
    for position in range(tasks):
        task = stream[position]
        assert stream.heads[task.head] == classes
        assert (len(task.train), len(task.validation), len(task.test)) == (train, validation, test)
        for part in (task.train, task.validation, task.test):
            assert part.inputs.dtype == torch.float32
            assert part.inputs.shape[1:] == inputs
            assert bool(part.inputs.isfinite().all())
            assert part.labels.dtype == torch.int64
        together = torch.cat([task.train.labels, task.validation.labels])
        assert together.bincount(minlength=classes).tolist() == [(train + validation) // classes] * classes
        assert task.test.labels.bincount(minlength=classes).tolist() == [test // classes] * classes
        seen.add(task.head)
    assert len(seen) == tasks
