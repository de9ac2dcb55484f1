"""The fast response normalisation is torch's, forward and backward."""

import pytest
import torch
from torch import Tensor, nn

from sgp.networks.response_norm import FastResponseNorm


def compute_output_and_gradient(module: nn.Module, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    out: Tensor = module(x)
    (gradient,) = torch.autograd.grad((out * weights).sum(), x)
    return out.detach(), gradient


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 20, 50])
@pytest.mark.parametrize("size", [4, 5])
# With the published alpha the denominator is nearly 1; with 1 and large inputs it decides.
@pytest.mark.parametrize(("alpha", "magnitude"), [(0.001 / 9, 1.0), (1.0, 3.0)])
def test_values_and_gradients_are_those_of_torch(
    memory_format: torch.memory_format, channels: int, size: int, alpha: float, magnitude: float
) -> None:
    torch.manual_seed(0)
    x = (magnitude * torch.randn(3, channels, 5, 6)).to(memory_format=memory_format)
    weights = torch.randn(x.shape)
    ours = compute_output_and_gradient(FastResponseNorm(size, alpha), x, weights)
    reference = compute_output_and_gradient(nn.LocalResponseNorm(size, alpha), x, weights)
    for got, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    assert ours[0].is_contiguous(memory_format=memory_format)


def test_the_gradient_is_that_of_differences() -> None:
    x = torch.randn(2, 6, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(FastResponseNorm(4, alpha=0.5), (x,))


def test_zero_stays_zero() -> None:
    ours = compute_output_and_gradient(FastResponseNorm(4, 0.1), torch.zeros(1, 4, 2, 2), torch.ones(1, 4, 2, 2))
    assert torch.equal(ours[0], torch.zeros(1, 4, 2, 2))
    assert torch.equal(ours[1], torch.ones(1, 4, 2, 2))


def test_the_second_derivative_is_correct() -> None:
    x = torch.randn(2, 5, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(FastResponseNorm(4, alpha=0.5), (x,))
