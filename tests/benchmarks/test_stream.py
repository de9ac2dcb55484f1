"""Streams are indexed by position; validation images are those of the published code."""

import pytest
import torch

from sgp.benchmarks.stream import Examples, Stream, Task, hold_out


def examples(count: int) -> Examples:
    return Examples(torch.arange(count).float().unsqueeze(1), torch.arange(count))


@pytest.mark.parametrize(("count", "share", "seed"), [(5000, 0.05, 0), (2500, 0.05, 3), (101, 0.1, 7), (10, 0.0, 1)])
def test_validation_is_the_first_share_of_scikit_learns_shuffle(count: int, share: float, seed: int) -> None:
    utils = pytest.importorskip("sklearn.utils", reason="of the extra 'benchmarks'")
    train, validation = hold_out(examples(count), share, seed)
    order = utils.shuffle(torch.arange(count).numpy(), random_state=seed)
    held = int(share * count)
    assert validation.labels.tolist() == order[:held].tolist()
    assert train.labels.tolist() == order[held:].tolist()
    assert torch.equal(train.inputs.flatten().long(), train.labels)


def test_a_stream_is_indexed_by_position_and_ends() -> None:
    def make(position: int) -> Task:
        return Task(f"task {position}", position, examples(3), examples(0), examples(2))

    stream = Stream(["task 0", "task 1"], (1,), [3, 3], make)
    assert len(stream) == 2
    assert [stream[position].name for position in range(2)] == list(stream.names)
    for position in (2, -1):
        with pytest.raises(IndexError, match="2 tasks"):
            stream[position]
