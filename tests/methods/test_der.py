"""Dark experience replay: logits are those of the moment of insertion, and the loss keeps outputs near them."""

import math
from typing import Any

import pytest
import torch
from methods.replay import make_batch
from torch.nn import functional as F
from torch.optim import SGD

from sgp.methods import Moment
from sgp.methods.der import DER, DERSettings, compute_distance
from sgp.networks import MLP

NOW, LATER = Moment(0, 0.0, 0.0), Moment(1, 0.0, 0.5)


def make_method(heads: tuple[int, ...] = (3, 3), **settings: Any) -> DER:
    torch.manual_seed(0)
    return DER(MLP((12, 16), heads), DERSettings(**settings), exclude=["heads.*"])


def test_stored_logits_are_those_of_the_moment_of_insertion() -> None:
    method = make_method()
    optimizer = SGD(method.network.parameters(), lr=0.5)
    first, second = make_batch(1), make_batch(2)
    with torch.no_grad():
        before = method.network(first[0], 0).clone()
    method.step(first, 0, NOW, optimizer)
    with torch.no_grad():
        between = method.network(second[0], 1).clone()
    method.step(second, 1, NOW, optimizer)
    for seed in range(3):
        method.step(make_batch(3 + seed), 1, Moment(0, 0.5, 0.5), optimizer)
    contents = method.buffer.contents
    torch.testing.assert_close(contents["logits"][:16], torch.cat([before, between]))
    assert torch.equal(contents["inputs"][:16], torch.cat([first[0], second[0]]))
    with torch.no_grad():
        now = method.network(first[0], 0)
    assert (now - before).abs().max() > 0.01  # while the network itself has moved on


@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_the_loss_has_the_distance_to_stored_logits_and_for_der_plus_plus_the_labels_too(beta: float) -> None:
    method = make_method(alpha=0.3, beta=beta)
    old, new = make_batch(1, 6), make_batch(2)
    with torch.no_grad():
        stored = method.network(old[0], 0).clone()
    method.step(old, 0, NOW, SGD(method.network.parameters(), lr=0.5))
    loss = method.compute_loss(new, 1, LATER)  # draws all six
    answers = method.network(old[0], 0)
    expected = (
        F.cross_entropy(method.network(new[0], 1), new[1])
        + 0.3 * (answers - stored).square().mean()
        + beta * F.cross_entropy(answers, old[1])
    )
    torch.testing.assert_close(loss, expected)
    wrong = method.network(old[0], 1)
    assert abs(float(((wrong - stored).square().mean() - (answers - stored).square().mean()).detach())) > 1e-3
    gradients = [torch.autograd.grad(value, list(method.network.parameters())) for value in (loss, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_der_plus_plus_draws_twice() -> None:
    sizes: list[int] = []
    for beta in (0.0, 0.5):
        method = make_method(beta=beta, memory_batch=5)
        method.step(make_batch(1, 20), 0, NOW, SGD(method.network.parameters(), lr=0.1))
        method.network.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
        method.compute_loss(make_batch(2), 1, NOW)
    assert sizes == [8, 5, 8, 5, 5]


def test_heads_of_different_class_counts_make_no_nan() -> None:
    counts = (2, 5, 1, 3)
    method = make_method(counts, beta=0.5)
    optimizer = SGD(method.network.parameters(), lr=0.1)
    for head, classes in enumerate(counts):
        for seed in range(3):
            assert math.isfinite(method.step(make_batch(seed, 8, classes), head, NOW, optimizer))
            assert all(torch.isfinite(weight).all() for weight in method.network.parameters())
    contents = method.buffer.contents
    assert contents["logits"].shape == (len(method.buffer), 5)
    for logits, head in zip(contents["logits"], contents["heads"].tolist(), strict=True):
        assert torch.isfinite(logits[: counts[head]]).all()
        assert (logits[counts[head] :] == -math.inf).all()


def test_the_distance_and_its_gradient_are_means_over_existing_classes() -> None:
    inf = math.inf
    answers = torch.tensor([[1.0, 2.0, 4.0], [3.0, -inf, -inf]], requires_grad=True)
    stored = torch.tensor([[0.0, 2.0, 2.0, -inf], [1.0, -inf, -inf, -inf]])
    found = compute_distance(answers, stored)
    assert found.item() == pytest.approx((1 + 0 + 4 + 4) / 4)
    found.backward()  # type: ignore[no-untyped-call]
    assert answers.grad is not None
    assert answers.grad.tolist() == [[0.5, 0.0, 1.0], [1.0, 0.0, 0.0]]


def test_examples_are_offered_in_every_epoch_or_in_the_first_of_a_task() -> None:
    for fill, seen in (("first-epoch", 8), ("every-epoch", 16)):
        method = make_method(fill=fill)
        optimizer = SGD(method.network.parameters(), lr=0.1)
        for moment in (NOW, LATER):
            method.step(make_batch(1), 0, moment, optimizer)
        assert method.buffer.seen == seen
    assert DERSettings().fill == "every-epoch"


def test_bytes_distinguish_data_and_logits() -> None:
    method = make_method(memory_size=10)
    assert method.count_bytes() == {"data": 0, "logits": 0}
    method.step(make_batch(1, 40), 0, NOW, SGD(method.network.parameters(), lr=0.1))
    assert method.count_bytes() == {"data": 10 * (12 * 4 + 8 + 8), "logits": 10 * 3 * 4}
    assert sum(method.count_bytes().values()) == sum(kept.nbytes for kept in method.state_dict()["contents"].values())
    assert method.keeps_data
