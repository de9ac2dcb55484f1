"""Dropout with a mask that is cheap to draw on a CPU."""

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

# A random word has 16 bits, and four of them are drawn at once.
LEVELS = 1 << 16
WORDS_PER_DRAW = 4


class FastDropout(nn.Module):
    """Dropout with the distribution of `nn.Dropout`: an element is 0 with probability `p`, or divided by 1 - p.

    On CPUs other than Intel's, `nn.Dropout` draws 64 bits for each element, one element at a time, which can take
    as long as a convolution. This module draws 16 bits and compares them in bulk, so `p` is rounded to a multiple of
    1/65536; the remaining elements are divided by one minus the rounded `p`, so that means are preserved. The bits come
    from torch's CPU generator and follow `torch.manual_seed`, but the masks differ from those of `nn.Dropout`.
    On other devices this module is `nn.Dropout`.

    Args:
        p: Probability that an element is 0.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        # Written so that NaN fails too.
        if not 0 <= p <= 1:
            raise ValueError(f"p must be in [0, 1], got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Return x, of any shape, with some elements 0 and the others scaled; in eval mode, x itself."""
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.p)
        # The product saves the mask for its backward pass and not x, since the mask takes no gradient.
        return x * draw_mask(x, self.p).mul_(get_scale(self.p))

    def extra_repr(self) -> str:
        """Return p as `nn.Dropout` does."""
        return f"p={self.p}"


class ReLUDropoutPool(FastDropout):
    """ReLU, `FastDropout` and max-pooling over squares of `size` pixels, with fewer passes over the feature map.

    A maximum is a positive number that was not dropped, or 0. So ReLU and the scale can follow the pooling,
    and the gradient needs no mask: what the pooling propagates goes to pixels that were not dropped, or is 0.

    Args:
        p: Probability that an element is 0.
        size: Side of the squares.
    """

    def __init__(self, p: float, size: int) -> None:
        super().__init__(p)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Apply the three in turn. x: [n, channels, h, w] -> [n, channels, h // size, w // size]."""
        if not self.training or self.p == 0:
            return F.max_pool2d(x, self.size).relu()
        if x.device.type != "cpu":
            return F.max_pool2d(F.dropout(x.relu(), self.p), self.size)
        out: Tensor = _ReLUDropoutPool.apply(x, self.p, self.size)  # type: ignore[no-untyped-call]
        return out

    def extra_repr(self) -> str:
        """Return p and size."""
        return f"p={self.p}, size={self.size}"


class _ReLUDropoutPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, p: float, size: int) -> Tensor:
        # The product overwrites the mask, which is not needed again.
        kept = draw_mask(x, p).mul_(x)
        out, indices = F.max_pool2d_with_indices(kept, (size, size))
        out.relu_().mul_(get_scale(p))
        ctx.save_for_backward(out, indices)
        ctx.p, ctx.size, ctx.shape = p, size, x.shape  # type: ignore[attr-defined]
        ctx.last = x.is_contiguous(memory_format=torch.channels_last)  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        out, indices = ctx.saved_tensors  # type: ignore[attr-defined]
        p, size = ctx.p, ctx.size  # type: ignore[attr-defined]
        at_maximum = torch.ops.aten.threshold_backward(gradient, out, 0) * get_scale(p)
        # Only the shape and the memory order of the input are read.
        memory_format = torch.channels_last if ctx.last else torch.contiguous_format  # type: ignore[attr-defined]
        like = torch.empty(ctx.shape, dtype=gradient.dtype, memory_format=memory_format)  # type: ignore[attr-defined]
        back: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
            at_maximum, like, [size, size], [size, size], [0, 0], [1, 1], False, indices
        )
        return back, None, None


def draw_mask(x: Tensor, p: float) -> Tensor:
    """Draw a tensor like x, also in memory format: 0 with probability p, rounded to a multiple of 1/65536, else 1."""
    dropped = round(p * LEVELS)
    mask = torch.empty_like(x, requires_grad=False)
    if dropped == LEVELS:
        return mask.zero_()
    words = draw_words(x.numel())
    # A tensor of `empty_like` has no gaps, so its memory can be filled in order. The comparison takes a third of the
    # time if it writes floats instead of booleans.
    torch.ge(words, dropped - LEVELS // 2, out=mask.as_strided(words.shape, (1,)))
    return mask


def draw_words(count: int) -> Tensor:
    """Draw [count] numbers over the whole range of int16 from torch's CPU generator."""
    draws = torch.empty(-(-count // WORDS_PER_DRAW), dtype=torch.int64)
    # With the lowest number and no upper end, all 64 bits are random. Without arguments the top bit stays 0.
    draws.random_(-(1 << 63), None)
    return draws.view(torch.int16)[:count]


def get_scale(p: float) -> float:
    """Return 1 / (1 - p), with p rounded to a multiple of 1/65536; 1 for p = 1."""
    kept = LEVELS - round(p * LEVELS)
    return LEVELS / kept if kept else 1.0
