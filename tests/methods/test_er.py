"""Experience replay: steps train on old examples again, each through the head of its own task."""

from typing import Any

import pytest
import torch
from methods.replay import make_batch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from sgp.methods import Batch, Moment
from sgp.methods.er import ER, ERSettings
from sgp.networks import MLP, LeNet

NOW, LATER = Moment(0, 0.0, 0.0), Moment(1, 0.0, 0.5)


def make_method(heads: tuple[int, ...] = (3, 3), **settings: Any) -> ER:
    torch.manual_seed(0)
    return ER(MLP((12, 16), heads), ERSettings(**settings), exclude=["heads.*"])


def fill_memory(method: ER, *tasks: tuple[Batch, int]) -> ER:
    """Fill the memory by steps on batches of tasks, and restore the weights."""
    still = SGD(method.network.parameters(), lr=0.0)
    for examples, head in tasks:
        method.step(examples, head, NOW, still)
    return method


def sum_losses(network: nn.Module, examples: Batch, head: int) -> Tensor:
    return F.cross_entropy(network(examples[0], head), examples[1], reduction="sum")


@pytest.mark.parametrize("heads", [(3, 3), (2, 3), (3,)], ids=str)
def test_the_loss_is_the_mean_over_the_batch_and_the_memory_each_through_its_own_head(heads: tuple[int, ...]) -> None:
    old, new = make_batch(1, 6, heads[0]), make_batch(2, 8, heads[-1])
    method = fill_memory(make_method(heads), (old, 0))
    loss = method.compute_loss(new, 1, LATER)  # draws all six
    expected = (sum_losses(method.network, new, 1) + sum_losses(method.network, old, 0)) / 14
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(value, list(method.network.parameters())) for value in (loss, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    if heads == (3, 3):  # and through another head it would be something else
        wrong = (sum_losses(method.network, new, 1) + sum_losses(method.network, old, 1)) / 14
        assert abs(float((loss - wrong).detach())) > 1e-3


def test_the_heads_of_old_tasks_keep_training() -> None:
    method = fill_memory(make_method(), (make_batch(1), 0))
    before = [weight.clone() for weight in method.network.heads.parameters()]  # type: ignore[union-attr]
    method.step(make_batch(2), 1, NOW, SGD(method.network.parameters(), lr=0.1))
    after = list(method.network.heads.parameters())  # type: ignore[union-attr]
    assert all(not torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_the_first_step_is_a_plain_one() -> None:
    method, new = make_method(), make_batch(1)
    torch.testing.assert_close(method.compute_loss(new, 0, NOW), sum_losses(method.network, new, 0) / 8)


@pytest.mark.parametrize(("memory_batch", "count"), [(None, 8), (5, 5), (100, 20)])
def test_a_draw_has_the_set_size_or_that_of_the_batch(memory_batch: int | None, count: int) -> None:
    method = fill_memory(make_method(memory_batch=memory_batch), (make_batch(1, 20), 0))
    sizes: list[int] = []
    method.network.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    method.compute_loss(make_batch(2), 1, NOW)
    assert sizes == [8 + count]


def test_examples_are_offered_in_the_first_epoch_of_a_task_or_in_every_one() -> None:
    for fill, seen in (("first-epoch", 8), ("every-epoch", 16)):
        method = make_method(fill=fill)
        optimizer = SGD(method.network.parameters(), lr=0.1)
        for moment in (NOW, LATER):
            method.step(make_batch(1), 0, moment, optimizer)
        assert method.buffer.seen == seen


def test_the_memory_has_inputs_labels_and_heads_and_says_so() -> None:
    old, new = make_batch(1), make_batch(2)
    method = fill_memory(make_method(memory_size=16), (old, 0), (new, 1))
    contents = method.buffer.contents
    assert torch.equal(contents["inputs"], torch.cat([old[0], new[0]]))
    assert torch.equal(contents["labels"], torch.cat([old[1], new[1]]))
    assert contents["heads"].tolist() == [0] * 8 + [1] * 8
    assert method.count_bytes() == {"data": 16 * (12 * 4 + 8 + 8)}
    assert method.keeps_data


def test_the_published_reservoir_is_an_option() -> None:
    assert make_method().buffer.draws == "uniform"
    assert make_method(reservoir="one-less").buffer.draws == "one-less"


def test_images_of_the_memory_have_the_format_of_the_batch() -> None:
    """Else the last bits of a convolution would depend on whether the memory has been in a file."""
    torch.manual_seed(0)
    method = ER(LeNet(heads=(2, 2)), ERSettings())
    images = torch.randn(4, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    labels = torch.tensor([0, 1, 0, 1])
    formats: list[bool] = []
    method.network.register_forward_pre_hook(
        lambda _, inputs: formats.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
    )
    optimizer = SGD(method.network.parameters(), lr=0.01)
    for _ in range(2):
        method.step((images, labels), 0, NOW, optimizer)
    assert formats == [True, True]
