"""Permuted digits are the same images in another order of pixels; split digits are two classes a task."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra 'benchmarks'")

from sgp.benchmarks.digits import CLASSES, PIXELS, Digits, load_stream
from sgp.benchmarks.stream import Stream, Task


def permute_digits(tasks: int = 10, seed: int = 0) -> Stream:
    return load_stream(Digits(tasks=tasks, validation=0.0), None, seed)


def split_digits(tasks: int = 5) -> Stream:
    return load_stream(Digits(kind="split", tasks=tasks, validation=0.0), None, 0)


def tasks(given: Stream) -> list[Task]:
    return [given[position] for position in range(len(given))]


def test_a_task_has_all_images_as_float_inputs_and_integer_labels() -> None:
    (task,) = tasks(permute_digits(tasks=1))
    assert task.train.inputs.shape == (1433, PIXELS)
    assert len(task.validation) == 0
    assert task.test.inputs.shape == (364, PIXELS)
    assert task.train.inputs.dtype == task.test.inputs.dtype == torch.float32
    assert task.train.labels.dtype == task.test.labels.dtype == torch.int64


def test_each_class_has_a_fifth_of_its_images_in_the_test_set() -> None:
    (task,) = tasks(permute_digits(tasks=1))
    train = task.train.labels.bincount(minlength=CLASSES)
    test = task.test.labels.bincount(minlength=CLASSES)
    torch.testing.assert_close(test / (train + test), torch.full((CLASSES,), 0.2), atol=0.005, rtol=0)


def test_inputs_are_standardized_by_the_training_images() -> None:
    (task,) = tasks(permute_digits(tasks=1))
    assert float(task.train.inputs.mean()) == pytest.approx(0, abs=1e-5)
    assert float(task.train.inputs.std()) == pytest.approx(1, abs=1e-5)


def test_tasks_differ_only_in_the_order_of_pixels() -> None:
    first, second = tasks(permute_digits(tasks=2))
    assert not torch.equal(first.train.inputs, second.train.inputs)
    torch.testing.assert_close(first.train.inputs.sort(dim=1).values, second.train.inputs.sort(dim=1).values)
    assert torch.equal(first.train.labels, second.train.labels)
    assert torch.equal(first.test.labels, second.test.labels)
    assert first.head == second.head == 0


def test_train_and_test_images_are_permuted_alike() -> None:
    first, second = tasks(permute_digits(tasks=2))

    def correlations(inputs: torch.Tensor) -> torch.Tensor:
        centred = inputs - inputs.mean(dim=0)
        return centred.T @ centred / len(inputs)

    # Correlations of pixels identify their places, and are nearly the same in both sets of images.
    for task in (first, second):
        same = torch.dist(correlations(task.train.inputs), correlations(task.test.inputs))
        assert same < 0.2 * correlations(task.train.inputs).norm()
    across = torch.dist(correlations(first.train.inputs), correlations(second.test.inputs))
    assert across > 0.8 * correlations(first.train.inputs).norm()


def test_a_longer_stream_begins_with_the_shorter_one() -> None:
    short, long = tasks(permute_digits(2, seed=3)), tasks(permute_digits(4, seed=3))
    for a, b in zip(short, long, strict=False):
        assert torch.equal(a.train.inputs, b.train.inputs)
        assert a.name == b.name


def test_another_seed_gives_other_orders_of_pixels() -> None:
    first, second = permute_digits(1, seed=0)[0], permute_digits(1, seed=1)[0]
    assert not torch.equal(first.train.inputs, second.train.inputs)


def test_the_global_random_state_does_not_change() -> None:
    before = torch.get_rng_state()
    tasks(permute_digits(2))
    assert torch.equal(before, torch.get_rng_state())


def test_split_digits_have_two_classes_and_a_head_for_each_task() -> None:
    split = split_digits()
    assert list(split.heads) == [2] * 5
    whole = tasks(split)
    assert [task.head for task in whole] == list(range(5))
    assert sum(len(task.train) for task in whole) == 1433
    assert sum(len(task.test) for task in whole) == 364
    for task in whole:
        assert sorted(task.train.labels.unique().tolist()) == [0, 1]
    # The images are those of the digits that the task is named after.
    base = permute_digits(1)[0]
    twos = base.train.labels == 2
    assert int((whole[1].train.labels == 0).sum()) == int(twos.sum())
    assert whole[1].name == "digits 2 and 3"


def test_split_digits_are_five_tasks_at_most() -> None:
    assert len(load_stream(Digits(kind="split"), None, 0)) == 5
    assert len(load_stream(Digits(kind="split", tasks=3), None, 0)) == 3


@pytest.mark.parametrize("kind", ["permuted", "split"])
def test_validation_images_are_drawn_by_the_runs_seed_or_the_settings(kind: str) -> None:
    def find_labels(seed: int, validation_seed: int | None = None) -> Tensor:
        settings = Digits(kind=kind, tasks=1, validation_seed=validation_seed)  # type: ignore[arg-type]
        return load_stream(settings, None, seed)[0].validation.labels

    assert torch.equal(find_labels(4, validation_seed=9), find_labels(9))
    assert not torch.equal(find_labels(4), find_labels(9))
