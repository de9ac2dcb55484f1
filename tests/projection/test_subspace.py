"""The subspace against the paper written out."""

import math

import numpy as np
import paper
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sgp.projection.gram import InputGram
from sgp.projection.subspace import Numerics, Subspace, compute_importance, find_minimal_rank


def make_gram(rows: Tensor, *, folded: bool | None = None) -> InputGram:
    """Return the Gram matrix of rows [n, d] or [groups, n, d]; ``folded`` is whether it must have dropped the rows."""
    rows = rows if rows.dim() == 3 else rows.unsqueeze(0)
    gram = InputGram(rows.shape[0], rows.shape[2], precise=True)
    for chunk in torch.split(rows, 7, dim=1):
        gram.add(chunk)
    if folded is not None:
        assert (gram.get_rows() is None) == folded
    return gram


def random_rows(n: int, d: int, seed: int) -> Tensor:
    """Rows with a decaying spectrum and a common mean, as activations have."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(d, d, generator=generator, dtype=torch.float64) * torch.linspace(1, 0.05, d)
    return torch.randn(n, d, generator=generator, dtype=torch.float64) @ mixing + 0.3


def assert_same_space(subspace: Subspace, M: np.ndarray) -> None:
    ours = subspace.basis[0].double().numpy()
    assert ours.shape == M.shape
    np.testing.assert_allclose(ours @ ours.T, M @ M.T, atol=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 10.0, 1e6, math.inf])
@pytest.mark.parametrize(("n", "folded"), [(12, False), (90, True)])
def test_many_tasks_agree_with_the_paper_written_out(n: int, folded: bool, alpha: float) -> None:
    d, out = 24, 5
    subspace = Subspace.empty(1, d)
    M, lam = np.zeros((d, 0)), np.zeros(0)
    for task in range(6):
        threshold = 0.80 + 0.02 * task
        rows = random_rows(n, d, seed=task)
        R = rows.numpy().T
        first = paper.learn_first_task(R, threshold, alpha)
        M, lam = paper.learn_next_task(M, lam, R, threshold, alpha) if task else first
        subspace = subspace.grow(make_gram(rows, folded=folded), threshold=threshold, alpha=alpha)
        assert_same_space(subspace, M)
        np.testing.assert_allclose(subspace.importance[0].numpy(), lam, atol=1e-5)
        gradient = torch.randn(1, out, d, dtype=torch.float64)
        expected = paper.scale_gradient(gradient[0].numpy().T, M, lam).T
        ready = subspace.to(gradient.device, torch.float64)
        ready.subtract_projection_(gradient, None, gradient, None)
        np.testing.assert_allclose(gradient[0].numpy(), expected, atol=1e-5)
    assert 0 < subspace.basis.shape[2] < d


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    n=st.integers(1, 40),
    d=st.integers(1, 12),
    threshold=st.floats(0.5, 0.999),
    alpha=st.floats(0, 50),
    seed=st.integers(0, 999),
)
def test_any_shape_agrees_with_the_paper(n: int, d: int, threshold: float, alpha: float, seed: int) -> None:
    first, second = random_rows(n, d, seed), random_rows(n, d, seed + 1000)
    M, lam = paper.learn_first_task(first.numpy().T, threshold, alpha)
    M, lam = paper.learn_next_task(M, lam, second.numpy().T, threshold, alpha)
    subspace = Subspace.empty(1, d).grow(make_gram(first), threshold=threshold, alpha=alpha)
    subspace = subspace.grow(make_gram(second), threshold=threshold, alpha=alpha)
    assert_same_space(subspace, M)
    np.testing.assert_allclose(subspace.importance[0].numpy(), lam, atol=1e-5)


def test_the_constant_of_a_bias_is_one_more_column() -> None:
    rows = random_rows(50, 9, seed=0)
    joint = torch.cat([rows, torch.ones(50, 1, dtype=torch.float64)], dim=1)
    for n in (6, 50):
        gram = InputGram(1, 9, constant=True, precise=True)
        gram.add(rows[:n].unsqueeze(0))
        with_constant = Subspace.empty(1, 10).grow(gram, threshold=0.95, alpha=3)
        expected = Subspace.empty(1, 10).grow(make_gram(joint[:n]), threshold=0.95, alpha=3)
        assert_same_space(with_constant, expected.basis[0].double().numpy())
        torch.testing.assert_close(with_constant.importance, expected.importance)


def test_float32_products_find_the_same_space() -> None:
    rows = random_rows(2000, 30, seed=3).unsqueeze(0)
    coarse = InputGram(1, 30)
    coarse.add(rows.float())
    a = Subspace.empty(1, 30).grow(coarse, threshold=0.99, alpha=5)
    b = Subspace.empty(1, 30).grow(make_gram(rows), threshold=0.99, alpha=5)
    assert_same_space(a, b.basis[0].double().numpy())
    torch.testing.assert_close(a.importance, b.importance, atol=1e-5, rtol=0)


def test_groups_are_independent_subspaces_of_their_own_rank() -> None:
    narrow = random_rows(40, 8, seed=1) @ torch.diag(torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0], dtype=torch.float64))
    wide = random_rows(40, 8, seed=2)
    tasks = [torch.stack([narrow, wide]), torch.stack([wide.flip(0) * 2, narrow])]
    stack = Subspace.empty(2, 8)
    single = [Subspace.empty(1, 8), Subspace.empty(1, 8)]
    ranks = []
    for rows in tasks:
        stack = stack.grow(make_gram(rows), threshold=0.97, alpha=4)
        single = [s.grow(make_gram(r), threshold=0.97, alpha=4) for s, r in zip(single, rows, strict=True)]
        ranks.append(stack.rank.tolist())
        assert ranks[-1] == [int(s.rank[0]) for s in single]
    assert ranks[0][0] < ranks[0][1]
    for g, alone in enumerate(single):
        k = int(stack.rank[g])
        torch.testing.assert_close(stack.importance[g, :k], alone.importance[0])
        assert (stack.basis[g, :, k:] == 0).all()
        torch.testing.assert_close(
            stack.basis[g, :, :k] @ stack.basis[g, :, :k].T,
            alone.basis[0] @ alone.basis[0].T,
            atol=1e-5,
            rtol=0,
        )


def test_hundred_tasks_stay_orthonormal_within_the_dimension() -> None:
    d = 40
    subspace = Subspace.empty(1, d)
    for task in range(100):
        generator = torch.Generator().manual_seed(task)
        rows = torch.randn(15 if task % 2 else 120, d, generator=generator) @ torch.randn(d, d, generator=generator)
        subspace = subspace.grow(make_gram(rows), threshold=min(0.9 + 0.001 * task, 0.999), alpha=10)
        M = subspace.basis[0].double()
        k = M.shape[1]
        assert k <= d
        assert (M.T @ M - torch.eye(k)).abs().max() < 1e-6
        assert subspace.importance.min() >= 0
        assert subspace.importance.max() <= 1


def test_threshold_one_takes_every_direction_and_no_noise() -> None:
    low_rank = random_rows(60, 5, seed=0) @ torch.randn(5, 30, dtype=torch.float64)
    for n in (20, 60):
        gram = make_gram(low_rank[:n])
        once = Subspace.empty(1, 30).grow(gram, threshold=1.0, alpha=1)
        assert once.rank.item() == 5
        again = once.grow(gram, threshold=1.0, alpha=1)
        assert again.rank.item() == 5


def test_minimal_rank_counts_what_is_discarded() -> None:
    energies = torch.tensor([[4.0, 3.0, 2.0, 1.0]], dtype=torch.float64)
    total = energies.sum(-1)
    for threshold, rank in [(0.4, 1), (0.41, 2), (0.7, 2), (0.71, 3), (0.9, 3), (0.91, 4), (1.0, 4)]:
        assert find_minimal_rank(energies, total, threshold).item() == rank
    assert find_minimal_rank(energies * 0, total * 0, 0.9).item() == 0


def test_an_all_zero_representation_adds_nothing() -> None:
    start = Subspace.empty(1, 6).grow(make_gram(random_rows(30, 6, seed=0)), threshold=0.9, alpha=math.inf)
    for n in (3, 30):
        after = start.grow(make_gram(torch.zeros(n, 6)), threshold=0.9, alpha=math.inf)
        assert torch.equal(after.basis, start.basis)
        assert torch.equal(after.importance, start.importance)
        assert Subspace.empty(1, 6).grow(make_gram(torch.zeros(n, 6)), threshold=0.9, alpha=2).is_empty


def test_the_strongest_basis_has_importance_one_exactly() -> None:
    sigma = torch.rand(3, 50, dtype=torch.float64)
    for alpha in (0.0, 0.1, 3.0, 7.7, 25.0):
        scaled = compute_importance(sigma, alpha)
        assert (scaled.amax(-1) == 1).all()
        assert (scaled.argmax(-1) == sigma.argmax(-1)).all()
    assert (compute_importance(sigma, math.inf) == 1).all()


def test_published_numerics_keep_one_basis_less_in_the_first_task_only() -> None:
    rows = random_rows(60, 20, seed=5)
    published = Numerics(first_rank="one-less", truncation="after", orthogonalise=False)
    ours = Subspace.empty(1, 20).grow(make_gram(rows), threshold=0.9, alpha=10)
    theirs = Subspace.empty(1, 20).grow(make_gram(rows), threshold=0.9, alpha=10, numerics=published)
    assert theirs.rank.item() == ours.rank.item() - 1
    torch.testing.assert_close(theirs.importance, ours.importance[:, :-1])
    more = random_rows(60, 20, seed=6)
    second = theirs.grow(make_gram(more), threshold=0.95, alpha=10, numerics=published)
    again = theirs.grow(make_gram(more), threshold=0.95, alpha=10)
    assert second.rank.item() == again.rank.item()


def test_dense_and_factored_projection_are_the_same() -> None:
    rows = random_rows(100, 16, seed=2)
    for threshold in (0.5, 0.9999):  # below and above half the dimension
        subspace = Subspace.empty(1, 16).grow(make_gram(rows), threshold=threshold, alpha=3)
        weight, bias = torch.randn(1, 4, 15), torch.randn(1, 4)
        joint = torch.cat([weight, bias.unsqueeze(-1)], dim=-1)
        M, lam = subspace.basis[0], subspace.importance[0]
        expected = joint - joint @ (M * lam) @ M.T
        subspace.subtract_projection_(weight, bias, weight, bias)
        torch.testing.assert_close(torch.cat([weight, bias.unsqueeze(-1)], dim=-1), expected, atol=1e-5, rtol=0)
    assert 2 * subspace.rank.item() > 16


@pytest.mark.parametrize("constant", [False, True])
def test_the_blocked_part_is_what_is_taken_away_and_lets_gradients_through(constant: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(2, 6 + constant, 3, generator=generator)).Q
    weights = torch.rand(2, 3, generator=generator).requires_grad_()
    subspace = Subspace(basis, weights.detach(), torch.tensor([3, 3]))
    source = torch.randn(2, 5, 6, generator=generator)
    bias = torch.randn(2, 5, generator=generator) if constant else None
    target, target_bias = torch.zeros_like(source), None if bias is None else torch.zeros_like(bias)
    subspace.subtract_projection_(source, bias, target, target_bias)
    part, part_of_bias = Subspace(basis, weights, subspace.rank).compute_blocked_part(source, bias)
    assert torch.allclose(part, -target, atol=1e-6)
    if part_of_bias is None or target_bias is None:
        assert part_of_bias is None
        assert target_bias is None
    else:
        assert torch.allclose(part_of_bias, -target_bias, atol=1e-6)
    (gradient,) = torch.autograd.grad(part.sum(), weights)
    assert float(gradient.abs().min()) > 0


def test_another_choice_of_how_many_directions_to_add_is_followed() -> None:
    gram = make_gram(random_rows(30, 6, seed=0))
    seen: list[tuple[int, ...]] = []

    def two(old: Tensor, new: Tensor, total: Tensor, threshold: float) -> Tensor:
        seen.append((old.shape[1], new.shape[1]))
        assert (threshold, float(total)) == (0.9, pytest.approx(float(old.sum() + new.sum())))
        return torch.tensor([2])

    start = Subspace.empty(1, 6).grow(gram, threshold=0.9, alpha=math.inf, choose=two)
    assert start.rank.tolist() == [2]
    assert start.grow(gram, threshold=0.9, alpha=math.inf, choose=two).rank.tolist() == [4]
    assert seen == [(0, 6), (2, 4)]  # what two bases leave over has four directions
