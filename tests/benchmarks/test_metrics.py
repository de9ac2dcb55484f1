"""ACC, BWT and relative FWT are those of the paper."""

import pytest
import torch

from sgp.benchmarks.metrics import acc, bwt, relative_fwt

R = torch.tensor([[0.9, 0.0, 0.0], [0.7, 0.8, 0.0], [0.6, 0.9, 0.5]])
OTHER = torch.tensor([[0.8, 0.0, 0.0], [0.1, 0.9, 0.0], [0.2, 0.3, 0.2]])


def test_acc_is_the_mean_of_the_last_row() -> None:
    assert acc(R) == pytest.approx((0.6 + 0.9 + 0.5) / 3)


def test_bwt_is_the_mean_change_since_each_earlier_task_was_learned() -> None:
    assert bwt(R) == pytest.approx(((0.6 - 0.9) + (0.9 - 0.8)) / 2)


def test_bwt_of_a_single_task_raises_an_error() -> None:
    with pytest.raises(ValueError, match="two tasks"):
        bwt(R[:1, :1])


def test_relative_fwt_compares_each_task_right_after_it_was_learned() -> None:
    assert relative_fwt(R, OTHER) == pytest.approx(((0.9 - 0.8) + (0.8 - 0.9) + (0.5 - 0.2)) / 3)
    assert relative_fwt(R, OTHER) == -relative_fwt(OTHER, R)
    assert relative_fwt(R, R) == 0
    assert relative_fwt(R[:1, :1], OTHER[:1, :1]) == pytest.approx(0.1)


def test_relative_fwt_of_runs_of_different_length_raises_an_error() -> None:
    with pytest.raises(ValueError, match="equally many tasks, got 3 and 2"):
        relative_fwt(R, OTHER[:2, :2])
