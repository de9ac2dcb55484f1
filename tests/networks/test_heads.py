"""Heads: one of them answers, a single one answers for all tasks."""

import pytest
import torch

from sgp.networks.heads import Heads


def test_only_the_head_of_the_task_answers() -> None:
    heads, features = Heads(6, (2, 3, 4)), torch.randn(5, 6)
    for task, head in enumerate(heads):
        torch.testing.assert_close(heads(features, task), features @ head.weight.T)
    heads(features, 1).sum().backward()
    assert [head.weight.grad is None for head in heads] == [True, False, True]


def test_a_single_head_is_shared_by_all_tasks() -> None:
    heads, features = Heads(6, (3,)), torch.randn(5, 6)
    assert torch.equal(heads(features, 7), heads(features, 0))


@pytest.mark.parametrize("task", [-1, 2])
def test_a_task_without_a_head_is_refused(task: int) -> None:
    with pytest.raises(IndexError, match=f"2 heads, from 0; got task {task}"):
        Heads(6, (3, 3))(torch.randn(1, 6), task)


def test_bias_is_an_option() -> None:
    assert [name for name, _ in Heads(6, (3,)).named_parameters()] == ["0.weight"]
    assert [name for name, _ in Heads(6, (3,), bias=True).named_parameters()] == ["0.weight", "0.bias"]


@pytest.mark.parametrize("classes", [(), (3, 0)])
def test_impossible_numbers_of_classes_are_refused(classes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="heads must be"):
        Heads(6, classes)
