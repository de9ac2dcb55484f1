"""Gram matrices collected batch by batch."""

import pytest
import torch

from sgp.projection.gram import InputGram


def test_rows_are_kept_while_they_are_few_and_folded_then() -> None:
    gram = InputGram(1, 10)
    gram.add(torch.randn(1, 6, 10))
    assert gram.get_rows() is not None
    with pytest.raises(RuntimeError, match="rows"):
        gram.get_gram()
    gram.add(torch.randn(1, 6, 10))
    assert gram.get_rows() is None
    assert gram.count == 12


@pytest.mark.parametrize("constant", [False, True])
def test_both_forms_give_the_same_energies(constant: bool) -> None:
    rows = torch.randn(2, 40, 8, dtype=torch.float64)
    joint = torch.cat([rows, torch.ones(2, 40, 1, dtype=torch.float64)], dim=2) if constant else rows
    matrix = torch.randn(2, 3, joint.shape[2], dtype=torch.float64)
    for n in (5, 40):
        gram = InputGram(2, 8, constant=constant)
        for part in torch.split(rows[:, :n], 3, dim=1):
            gram.add(part)
        part = joint[:, :n]
        torch.testing.assert_close(gram.compute_energy(), part.square().sum((1, 2)))
        torch.testing.assert_close(gram.compute_energy_through(matrix), (part @ matrix.mT).square().sum((1, 2)))


def test_size_does_not_grow_with_the_rows() -> None:
    gram = InputGram(1, 32, constant=True)
    sizes = set()
    for _ in range(200):
        gram.add(torch.randn(1, 50, 32))
        sizes.add(gram.nbytes)
    assert sizes == {33 * 33 * 8}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_are_refused_and_leave_nothing(bad: float) -> None:
    gram = InputGram(1, 4)
    rows = torch.ones(1, 3, 4)
    gram.add(rows)
    rows = rows.clone()
    rows[0, 1, 2] = bad
    with pytest.raises(FloatingPointError):
        gram.add(rows)
    assert gram.count == 3


def test_rows_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="groups"):
        InputGram(2, 4).add(torch.ones(1, 3, 4))


def test_a_clone_is_independent() -> None:
    gram = InputGram(1, 4)
    gram.add(torch.ones(1, 9, 4))
    twin = gram.clone()
    twin.add(torch.ones(1, 1, 4))
    assert (gram.count, twin.count) == (9, 10)
    assert float(twin.compute_energy()) == 40
    assert float(gram.compute_energy()) == 36


def test_numbers_too_large_to_square_are_refused() -> None:
    with pytest.raises(FloatingPointError):
        InputGram(1, 4).add(torch.full((1, 9, 4), 1e20))
