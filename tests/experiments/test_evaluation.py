"""Loss and accuracy of a network, in batches that every network can take."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from sgp.benchmarks.stream import Examples
from sgp.experiments.evaluation import Score, evaluate, split_rows
from sgp.networks import MLP


@given(st.integers(0, 50), st.integers(1, 20))
def test_batches_have_every_row_in_its_order_and_never_a_single_one(rows: int, size: int) -> None:
    order = torch.randperm(rows)
    batches = list(split_rows(order, size))
    assert torch.equal(torch.cat([*batches, order[:0]]), order)
    if size > 1 and rows > 1:
        assert all(len(batch) > 1 for batch in batches)
    assert all(len(batch) <= size + 1 for batch in batches)


def examples(count: int) -> Examples:
    torch.manual_seed(0)
    return Examples(torch.randn(count, 6), torch.randint(3, (count,)))


def test_a_score_is_the_mean_over_all_examples() -> None:
    model, given_ = MLP((6, 8), (3, 3)), examples(21)
    score = evaluate(model, given_, 1, batch=4, order=torch.randperm(21))
    logits = model(given_.inputs, 1).detach()
    assert score.loss == pytest.approx(float(F.cross_entropy(logits, given_.labels)), rel=1e-5)
    assert score.accuracy == 100 * int((logits.argmax(1) == given_.labels).sum()) / 21


class Watched(nn.Module):
    """Notes what it was given and in which mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, track_running_stats=False)
        self.seen: list[Tensor] = []
        self.modes: set[bool] = set()
        self.head: int | None = None

    def forward(self, x: Tensor, head: int) -> Tensor:
        assert not torch.is_grad_enabled()
        self.seen.append(x)
        self.modes.add(self.training)
        self.head = head
        logits: Tensor = self.norm(x)[:, :3]
        return logits


@pytest.mark.parametrize("mode", [True, False])
def test_it_runs_in_eval_mode_in_the_order_given_and_restores_the_mode(mode: bool) -> None:
    model, given_ = Watched(), examples(9)
    model.train(mode)
    order = torch.randperm(9)
    first = evaluate(model, given_, 2, batch=4, order=order)
    assert torch.equal(torch.cat(model.seen), given_.inputs[order])
    assert [len(batch) for batch in model.seen] == [4, 5]
    assert (model.modes, model.training, model.head) == ({False}, mode, 2)
    assert evaluate(model, given_, 2, batch=4, order=order) == first
    # With statistics of the batch the composition matters, which is why the order is fixed.
    assert evaluate(model, given_, 2, batch=4, order=order.flip(0)) != first


def test_the_mode_is_restored_after_an_error() -> None:
    model = Watched().train()
    with pytest.raises(IndexError):
        evaluate(model, examples(4), 0, batch=2, order=torch.tensor([0, 99]))
    assert model.training


def test_no_examples_have_no_score() -> None:
    model = Watched()
    assert evaluate(model, examples(4), 0, batch=2, order=torch.randperm(0)) == Score(None, None)
    assert model.seen == []
