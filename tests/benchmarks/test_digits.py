"""Permuted digits: the same images in another order of pixels, the same split every time."""

import pytest
import torch

pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra 'benchmarks'")

from sgp.benchmarks.digits import CLASSES, PIXELS, permuted_digits


def test_a_task_has_all_images_as_float_inputs_and_integer_labels() -> None:
    (task,) = permuted_digits(tasks=1)
    assert task.train_inputs.shape == (1433, PIXELS)
    assert task.test_inputs.shape == (364, PIXELS)
    assert task.train_inputs.dtype == task.test_inputs.dtype == torch.float32
    assert task.train_labels.dtype == task.test_labels.dtype == torch.int64


def test_each_class_has_a_fifth_of_its_images_in_the_test_set() -> None:
    (task,) = permuted_digits(tasks=1)
    train = task.train_labels.bincount(minlength=CLASSES)
    test = task.test_labels.bincount(minlength=CLASSES)
    torch.testing.assert_close(test / (train + test), torch.full((CLASSES,), 0.2), atol=0.005, rtol=0)


def test_inputs_are_standardised_by_the_training_images() -> None:
    (task,) = permuted_digits(tasks=1)
    assert float(task.train_inputs.mean()) == pytest.approx(0, abs=1e-5)
    assert float(task.train_inputs.std()) == pytest.approx(1, abs=1e-5)


def test_tasks_differ_only_in_the_order_of_pixels() -> None:
    first, second = permuted_digits(tasks=2)
    assert not torch.equal(first.train_inputs, second.train_inputs)
    torch.testing.assert_close(first.train_inputs.sort(dim=1).values, second.train_inputs.sort(dim=1).values)
    assert torch.equal(first.train_labels, second.train_labels)
    assert torch.equal(first.test_labels, second.test_labels)


def test_train_and_test_images_are_permuted_alike() -> None:
    first, second = permuted_digits(tasks=2)

    def correlations(inputs: torch.Tensor) -> torch.Tensor:
        centred = inputs - inputs.mean(dim=0)
        return centred.T @ centred / len(inputs)

    # Which pixels vary together tells where they went, and is nearly the same in both sets of images.
    for task in (first, second):
        same = torch.dist(correlations(task.train_inputs), correlations(task.test_inputs))
        assert same < 0.2 * correlations(task.train_inputs).norm()
    across = torch.dist(correlations(first.train_inputs), correlations(second.test_inputs))
    assert across > 0.8 * correlations(first.train_inputs).norm()


def test_a_longer_stream_begins_with_the_shorter_one() -> None:
    short, long = list(permuted_digits(2, seed=3)), list(permuted_digits(4, seed=3))
    for a, b in zip(short, long, strict=False):
        assert torch.equal(a.train_inputs, b.train_inputs)
        assert a.name == b.name


def test_another_seed_gives_other_orders_of_pixels() -> None:
    (first,), (second,) = permuted_digits(1, seed=0), permuted_digits(1, seed=1)
    assert not torch.equal(first.train_inputs, second.train_inputs)


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    list(permuted_digits(2))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("arguments", [{"tasks": 0}, {"seed": -1}])
def test_bad_numbers_are_refused_by_name(arguments: dict[str, int]) -> None:
    (name,) = arguments
    with pytest.raises(ValueError, match=name):
        permuted_digits(**arguments)
