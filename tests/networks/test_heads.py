"""The task's head is evaluated; a single head is shared by all tasks."""

import math

import pytest
import torch
from torch.nn import functional as F

from sgp.networks.heads import Heads, check_shape


def test_only_the_head_of_the_task_is_evaluated() -> None:
    heads, features = Heads(6, (2, 3, 4)), torch.randn(5, 6)
    for task, head in enumerate(heads):
        torch.testing.assert_close(heads(features, task), features @ head.weight.T)
    heads(features, 1).sum().backward()
    assert [head.weight.grad is None for head in heads] == [True, False, True]


def test_a_single_head_is_shared_by_all_tasks() -> None:
    heads, features = Heads(6, (3,)), torch.randn(5, 6)
    assert torch.equal(heads(features, 7), heads(features, 0))


@pytest.mark.parametrize("task", [-1, 2])
def test_a_task_without_a_head_raises_an_error(task: int) -> None:
    with pytest.raises(IndexError, match=f"2 heads, from 0; got task {task}"):
        Heads(6, (3, 3))(torch.randn(1, 6), task)


def test_bias_is_an_option() -> None:
    assert [name for name, _ in Heads(6, (3,)).named_parameters()] == ["0.weight"]
    assert [name for name, _ in Heads(6, (3,), bias=True).named_parameters()] == ["0.weight", "0.bias"]


@pytest.mark.parametrize("classes", [(), (3, 0)])
def test_invalid_numbers_of_classes_raise_an_error(classes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="heads must be"):
        Heads(6, classes)


def make_mixed(*classes: int, bias: bool = True) -> tuple[Heads, torch.Tensor, torch.Tensor]:
    """Create heads, features of twelve examples and the task of each, in random order."""
    torch.manual_seed(0)
    tasks = torch.arange(12)[torch.randperm(12)] % len(classes)
    return Heads(6, classes, bias=bias), torch.randn(12, 6, requires_grad=True), tasks


def test_examples_of_several_tasks_are_evaluated_by_their_own_heads() -> None:
    heads, features, tasks = make_mixed(3, 3, 3)
    logits = heads(features, tasks)
    for row, task in enumerate(tasks.tolist()):
        torch.testing.assert_close(logits[row], heads(features[row : row + 1], task)[0])


def test_classes_that_a_head_does_not_have_are_minus_infinity() -> None:
    heads, features, tasks = make_mixed(2, 5, 1)
    logits = heads(features, tasks)
    assert logits.shape == (12, 5)
    for row, task in enumerate(tasks.tolist()):
        count = (2, 5, 1)[task]
        torch.testing.assert_close(logits[row, :count], heads(features[row : row + 1], task)[0])
        assert (logits[row, count:] == -math.inf).all()


def test_there_are_only_as_many_columns_as_the_examples_heads_need() -> None:
    heads, features, _ = make_mixed(2, 5, 1)
    assert heads(features, torch.zeros(12, dtype=torch.long)).shape == (12, 2)
    assert torch.equal(heads(features, torch.ones(12, dtype=torch.long)), heads(features, 1))


@pytest.mark.parametrize("classes", [(3, 3, 3), (2, 5, 1)], ids=str)
def test_loss_and_gradients_of_mixed_examples_are_those_of_one_head_after_another(classes: tuple[int, ...]) -> None:
    heads, features, tasks = make_mixed(*classes)
    labels = torch.tensor([row % classes[task] for row, task in enumerate(tasks.tolist())])
    loss = F.cross_entropy(heads(features, tasks), labels)
    by_head = [
        F.cross_entropy(heads(features[tasks == task], task), labels[tasks == task], reduction="sum")
        for task in range(len(classes))
    ]
    expected = sum(by_head[1:], start=by_head[0]) / 12
    assert torch.isfinite(loss)
    torch.testing.assert_close(loss, expected)
    wanted = [features, *heads.parameters()]
    for ours, theirs in zip(torch.autograd.grad(loss, wanted), torch.autograd.grad(expected, wanted), strict=True):
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours, theirs)


def test_a_head_without_an_example_has_no_gradient() -> None:
    heads, features, _ = make_mixed(2, 5, 1)
    heads(features, torch.tensor([0, 2] * 6))[:, 0].sum().backward()
    assert [head.weight.grad is None for head in heads] == [False, True, False]


def test_a_single_head_is_evaluated_for_examples_of_all_tasks() -> None:
    heads, features, _ = make_mixed(3)
    tasks = torch.tensor([0, 7, 1] * 4)
    torch.testing.assert_close(heads(features, tasks), heads(features, 0))


def test_an_example_of_a_task_without_a_head_raises_an_error() -> None:
    heads, features, _ = make_mixed(3, 3)
    with pytest.raises(IndexError, match="2 heads, from 0; got task 2"):
        heads(features, torch.tensor([0, 1, 2] * 4))


def test_an_unsupported_shape_raises_an_error_with_the_supported_ones() -> None:
    check_shape("AlexNet", (3, 32, 32), [(3, 32, 32)])
    with pytest.raises(
        ValueError, match=r"AlexNet takes inputs of shape \(3, 32, 32\) or \(3, 84, 84\), got \(1, 8, 8\)"
    ):
        check_shape("AlexNet", (1, 8, 8), [(3, 32, 32), (3, 84, 84)])
