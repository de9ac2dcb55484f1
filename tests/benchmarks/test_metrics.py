"""ACC, BWT and FWT are those of the paper."""

import pytest
import torch

from sgp.benchmarks.metrics import acc, bwt, fwt, relative_fwt

R = torch.tensor([[0.9, 0.0, 0.0], [0.7, 0.8, 0.0], [0.6, 0.9, 0.5]])
OTHER = torch.tensor([[0.8, 0.0, 0.0], [0.1, 0.9, 0.0], [0.2, 0.3, 0.2]])


def test_acc_is_the_mean_of_the_last_row() -> None:
    assert acc(R) == pytest.approx((0.6 + 0.9 + 0.5) / 3)


def test_bwt_is_the_mean_change_since_each_earlier_task_was_learned() -> None:
    assert bwt(R) == pytest.approx(((0.6 - 0.9) + (0.9 - 0.8)) / 2)


def test_bwt_of_a_single_task_is_refused() -> None:
    with pytest.raises(ValueError, match="two tasks"):
        bwt(R[:1, :1])


def test_fwt_is_the_mean_gain_over_networks_of_their_own() -> None:
    alone = torch.tensor([0.7, 0.9, 0.4])
    assert fwt(R, alone) == pytest.approx(((0.9 - 0.7) + (0.8 - 0.9) + (0.5 - 0.4)) / 3)


def test_fwt_counts_the_first_task_and_a_stream_of_one() -> None:
    assert fwt(R[:1, :1], torch.tensor([0.4])) == pytest.approx(0.5)


def test_fwt_with_another_number_of_tasks_is_refused() -> None:
    with pytest.raises(ValueError, match="3 tasks and 2 accuracies"):
        fwt(R, torch.tensor([0.7, 0.9]))


def test_relative_fwt_compares_each_task_when_it_was_just_learned() -> None:
    assert relative_fwt(R, OTHER) == pytest.approx(((0.9 - 0.8) + (0.8 - 0.9) + (0.5 - 0.2)) / 3)
    assert relative_fwt(R, OTHER) == -relative_fwt(OTHER, R)
    assert relative_fwt(R, R) == 0
