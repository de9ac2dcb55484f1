"""ACC and BWT are those of the paper."""

import pytest
import torch

from sgp.benchmarks.metrics import acc, bwt

R = torch.tensor([[0.9, 0.0, 0.0], [0.7, 0.8, 0.0], [0.6, 0.9, 0.5]])


def test_acc_is_the_mean_of_the_last_row() -> None:
    assert acc(R) == pytest.approx((0.6 + 0.9 + 0.5) / 3)


def test_bwt_is_the_mean_change_since_each_earlier_task_was_learned() -> None:
    assert bwt(R) == pytest.approx(((0.6 - 0.9) + (0.9 - 0.8)) / 2)


def test_bwt_of_a_single_task_is_refused() -> None:
    with pytest.raises(ValueError, match="two tasks"):
        bwt(R[:1, :1])
