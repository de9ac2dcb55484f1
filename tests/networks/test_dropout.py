"""The fast dropout has the distribution of torch's, and its gradient is its mask."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgp.networks.dropout import FastDropout, ReLUDropoutPool, draw_mask, draw_words

MEMORY_FORMATS = [torch.contiguous_format, torch.channels_last]


def assert_rate(hits: Tensor, rate: float) -> None:
    """Assert that the mean over the first dimension is `rate`, within five deviations in every column."""
    deviation = math.sqrt(rate * (1 - rate) / len(hits))
    assert float((hits.double().mean(0) - rate).abs().max()) < 5 * deviation


@pytest.mark.parametrize("p", [0.0001, 0.2, 0.5, 0.9])
def test_each_element_is_dropped_with_probability_p(p: float) -> None:
    torch.manual_seed(0)
    # Eight columns, so that each of the four words of a draw shows twice.
    out = FastDropout(p)(torch.ones(100_000, 8))
    assert_rate(out == 0, p)
    kept = out[out != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - p)), rtol=2e-5 / (1 - p), atol=0)


def test_every_bit_of_every_word_is_fair() -> None:
    torch.manual_seed(0)
    # A column for each of the four words that come from one draw.
    words = draw_words(800_000).view(-1, 4).int()
    for bit in range(16):
        assert_rate((words >> bit) & 1, 0.5)


def test_neighbours_are_independent() -> None:
    torch.manual_seed(0)
    centred = draw_mask(torch.ones(400_000), p=0.5) - 0.5
    for lag in (1, 2, 3, 4, 8, 64):
        assert abs(float((centred[lag:] * centred[:-lag]).mean()) / 0.25) < 5 / math.sqrt(len(centred))


@pytest.mark.parametrize("p", [0.2, 0.5])
def test_means_are_preserved(p: float) -> None:
    torch.manual_seed(0)
    x = torch.rand(1_000_000, dtype=torch.float64)
    out = FastDropout(p)(x)
    # The variance that dropout adds to an element is x^2 p/(1-p).
    deviation = math.sqrt(float((x**2).mean()) * p / (1 - p) / len(x))
    assert abs(float(out.mean() - x.mean())) < 5 * deviation


@pytest.mark.parametrize("memory_format", MEMORY_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gradient_is_the_mask(memory_format: torch.memory_format, dtype: torch.dtype) -> None:
    x = torch.rand(3, 5, 7, 3, dtype=dtype).add_(1).to(memory_format=memory_format).requires_grad_()
    out = FastDropout(0.3)(x)
    out.sum().backward()
    assert x.grad is not None
    assert 0 < int((x.grad == 0).sum()) < x.numel()
    assert torch.equal(out, x * x.grad)
    assert out.dtype is dtype
    assert out.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0, 3), (5, 3, 1)])
def test_any_size_is_supported(shape: tuple[int, ...]) -> None:
    assert FastDropout(0.5)(torch.ones(shape)).shape == shape


def test_a_view_with_gaps_is_supported() -> None:
    torch.manual_seed(0)
    x = torch.ones(2000, 8)[:, ::2].T
    out = FastDropout(0.5)(x)
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert_rate(out.T == 0, 0.5)


def test_it_follows_the_seed_of_torch() -> None:
    dropout, x = FastDropout(0.5), torch.ones(1001)
    torch.manual_seed(1)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(1)
    assert torch.equal(dropout(x), first)
    assert torch.equal(dropout(x), second)
    assert not torch.equal(first, second)


def test_p_of_0_keeps_and_p_of_1_drops_everything() -> None:
    x = torch.randn(100, requires_grad=True)
    assert FastDropout(0.0)(x) is x
    for p in (1.0, 1 - 1e-9):
        out = FastDropout(p)(x)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert not out.any()
        assert not gradient.any()
    assert torch.equal(FastDropout(1e-9)(x), x)


def test_in_eval_mode_it_does_nothing() -> None:
    x = torch.randn(100)
    assert FastDropout(0.5).eval()(x) is x


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_an_invalid_p_raises_an_error(p: float) -> None:
    with pytest.raises(ValueError, match="p must be"):
        FastDropout(p)


def test_other_devices_use_the_dropout_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def dropout(x: Tensor, p: float) -> Tensor:
        seen.append(p)
        return x

    monkeypatch.setattr(F, "dropout", dropout)
    x = torch.ones(4, 3, 8, 8, device="meta")
    assert FastDropout(0.2)(x).shape == x.shape
    assert ReLUDropoutPool(0.5, size=2)(x).shape == (4, 3, 4, 4)
    assert seen == [0.2, 0.5]


def apply_separately(x: Tensor, p: float, size: int) -> Tensor:
    """Apply ReLU, dropout and pooling one after another."""
    return F.max_pool2d(FastDropout(p)(F.relu(x)), size)


@pytest.mark.parametrize("memory_format", MEMORY_FORMATS)
@pytest.mark.parametrize("p", [0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("size", [2, 3])
def test_the_fused_module_equals_separate_modules(memory_format: torch.memory_format, p: float, size: int) -> None:
    torch.manual_seed(0)
    # 29 is not a multiple of the size, and no two pixels are equal, so every maximum has one place.
    x = torch.randperm(3 * 5 * 29 * 11).float().sub_(2000).view(3, 5, 29, 11).to(memory_format=memory_format)
    x.requires_grad_()
    torch.manual_seed(1)
    expected = apply_separately(x, p, size)
    torch.manual_seed(1)
    out = ReLUDropoutPool(p, size)(x)
    assert torch.equal(out, expected)
    assert out.is_contiguous(memory_format=memory_format)
    weights = torch.randn(out.shape)
    (gradient,) = torch.autograd.grad((out * weights).sum(), x)
    (reference,) = torch.autograd.grad((expected * weights).sum(), x)
    torch.testing.assert_close(gradient, reference)


def test_the_fused_module_accepts_views_and_other_dtypes() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        x = torch.randn(6, 8, 2, 3, dtype=dtype).permute(2, 3, 1, 0).requires_grad_()
        torch.manual_seed(1)
        out = ReLUDropoutPool(0.5, size=2)(x)
        torch.manual_seed(1)
        assert torch.equal(out, apply_separately(x, 0.5, 2))
        out.sum().backward()
        assert x.grad is not None
        assert int((x.grad != 0).sum()) == int((out != 0).sum())


def test_the_fused_module_has_a_second_derivative() -> None:
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return ReLUDropoutPool(0.3, size=2)(x * x - 0.5)

    assert torch.autograd.gradcheck(seeded, (x,))
    assert torch.autograd.gradgradcheck(seeded, (x,))


@pytest.mark.parametrize("module", [ReLUDropoutPool(0.5, size=2).eval(), ReLUDropoutPool(0.0, size=2)])
def test_without_dropout_the_fused_module_is_relu_and_pooling(module: nn.Module) -> None:
    x = torch.randn(2, 3, 9, 9)
    assert torch.equal(module(x), F.max_pool2d(F.relu(x), 2))
