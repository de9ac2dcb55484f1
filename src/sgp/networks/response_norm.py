"""Local response normalization that is cheap on a CPU."""

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

BETA = 0.75


class FastResponseNorm(nn.Module):
    """Equivalent of `nn.LocalResponseNorm(size, alpha, beta=0.75, k=1)`: x / (1 + alpha m)^0.75, m a mean of squares.

    The mean at channel c is over the channels from c - size//2 to c + (size-1)//2, with 0 outside, as in torch.
    Torch uses 3D pooling and a power, at ten times the cost.

    Args:
        size: Number of channels in the mean.
        alpha: Factor of the mean.
    """

    def __init__(self, size: int, alpha: float) -> None:
        super().__init__()
        self.size, self.alpha = size, alpha

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over neighbouring channels. x: [n, channels, ...]."""
        out: Tensor = _ResponseNorm.apply(x, self.size, self.alpha)  # type: ignore[no-untyped-call]
        return out

    def extra_repr(self) -> str:
        """Return the settings as `nn.LocalResponseNorm` does."""
        return f"{self.size}, alpha={self.alpha}"


class _ResponseNorm(torch.autograd.Function):
    """Function y_c = x_c d_c^-3/4 with d_c = 1 + a sum_j x_j^2 over the window of c, a = alpha/size."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, size: int, alpha: float) -> Tensor:
        a = alpha / size
        d = torch.addcmul(x.new_ones(()), x, x, value=a)
        for shift in _list_shifts(size):
            here, there = _find_overlap(x.shape[1], shift)
            neighbour = x[:, there]
            d[:, here].addcmul_(neighbour, neighbour, value=a)
        # d^-3/4 by roots only: a power costs 20 times as much, and so does `sqrt`, which unlike `rsqrt` is MKL's.
        root = d.rsqrt()
        factor = root.rsqrt().mul_(root).mul_(root)
        ctx.save_for_backward(x, d, factor)
        ctx.size, ctx.alpha = size, alpha  # type: ignore[attr-defined]
        return x * factor

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, d, factor = ctx.saved_tensors  # type: ignore[attr-defined]
        size, alpha = ctx.size, ctx.alpha  # type: ignore[attr-defined]
        if torch.is_grad_enabled():
            # For a second derivative, the gradient is recomputed from x: d and factor have no graph.
            reference = F.local_response_norm(x, size, alpha, BETA)
            (differentiable,) = torch.autograd.grad(reference, x, gradient, create_graph=True)
            return differentiable, None, None
        # x_c is in the window of j = c - shift: gx_c = g_c d_c^-3/4 - 3/2 a x_c sum_j g_j x_j d_j^-7/4.
        a = alpha / size
        out = gradient * factor
        inner = (out * x).div_(d)
        out.addcmul_(x, inner, value=-2 * BETA * a)
        for shift in _list_shifts(size):
            here, there = _find_overlap(x.shape[1], -shift)
            out[:, here].addcmul_(x[:, here], inner[:, there], value=-2 * BETA * a)
        return out, None, None


def _list_shifts(size: int) -> list[int]:
    """Return the offsets of the neighbours in a channel's window."""
    return [shift for shift in range(-(size // 2), (size - 1) // 2 + 1) if shift]


def _find_overlap(channels: int, shift: int) -> tuple[slice, slice]:
    """Return the channels that have a neighbour at this shift, and these neighbours."""
    return slice(max(0, -shift), channels - max(0, shift)), slice(max(0, shift), channels - max(0, -shift))
