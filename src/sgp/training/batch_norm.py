"""What BatchNorm goes by, where that is not what its modules have at hand.

Modules stay as they are: while one of these modes is entered, the function that they all call is answered by it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

NAMES = inspect.signature(F.batch_norm)


class Parts(Protocol):
    """Who has the parts of a batch.

    Attributes:
        share: of the batch that is this process's, in [0, 1].
    """

    share: float

    def sum_(self, tensor: Tensor) -> Tensor:
        """Over all processes, in place."""
        ...


class _Mode(TorchFunctionMode):
    """While entered, `_batch_norm` is called for `F.batch_norm`, with its arguments by their names."""

    _batch_norm: Callable[..., Tensor]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        return (
            self._batch_norm(**NAMES.bind(*args, **given).arguments) if func is F.batch_norm else func(*args, **given)
        )


class MixedStatistics(_Mode):
    """While entered, BatchNorm in eval mode goes by the stored examples and those of the batch together.

    Statistics of a small batch are noisy, and stored ones fall behind where later tasks move the weights; those of
    both together are less of either. They are the mean and variance of a set in which the stored ones stand for so
    many examples.

    Args:
        examples: that stored statistics stand for; with 0 the batch goes by itself alone.
    """

    def __init__(self, examples: int) -> None:
        super().__init__()
        self.examples = examples

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool = False,
        **others: Any,
    ) -> Tensor:
        if not training and running_mean is not None and running_var is not None:
            variance, mean = torch.var_mean(input, but_channels(input), correction=0)
            share = self.examples / (self.examples + len(input))
            between = share * (1 - share) * (mean - running_mean).square()
            running_var = torch.lerp(variance, running_var, share) + between
            running_mean = torch.lerp(mean, running_mean, share)
        return F.batch_norm(input, running_mean, running_var, training=training, **others)


class BatchNormOfAll(_Mode):
    """While entered, BatchNorm that goes by the batch goes by the whole one, of which other processes have parts."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.parts = parts

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        count, mean, variance = self._statistics(input.detach())
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((variance * count / max(count - 1, 1)).to(running_var.dtype), momentum)
        root = (variance + eps).rsqrt().to(input.dtype)
        normalised: Tensor = _Normalised.apply(input, mean.to(input.dtype), root, count, self.parts)  # type: ignore[no-untyped-call]
        if weight is not None:
            normalised = normalised * _along(weight, input)
        # What comes next may write to it, so it must not be what the backward pass needs.
        return normalised.clone() if bias is None else normalised + _along(bias, input)

    def _statistics(self, x: Tensor) -> tuple[float, Tensor, Tensor]:
        """How many numbers a channel of the whole batch has, their mean and variance [channels], in float64."""
        channels, own = x.shape[1], float(x.numel() // x.shape[1] if self.parts.share else 0)
        variance, mean = torch.var_mean(x, but_channels(x), correction=0)
        mean, variance = mean.double(), variance.double()
        sums = torch.cat([mean.new_tensor([own]), own * mean, own * (variance + mean.square())])
        count, first, second = torch.split(self.parts.sum_(sums), [1, channels, channels])
        whole = first / count
        return count.item(), whole, (second / count - whole.square()).clamp(min=0)


class _Normalised(torch.autograd.Function):
    """y = (x - m) r, with m and r the mean and one over the deviation of all processes' x."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, mean: Tensor, root: Tensor, count: float, parts: Parts) -> Tensor:
        y = (x - _along(mean, x)) * _along(root, x)
        ctx.save_for_backward(y, root)
        ctx.count, ctx.parts, ctx.share = count, parts, parts.share  # type: ignore[attr-defined]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        """The loss of all is the sum of each process's own times its share s. Its gradient for x is

            r (s g - (sum s g + y sum s g y) / n)

        with g the gradient of the own loss for y and sums over all n numbers of a channel. Each process goes on with
        the gradient of its own loss, which is that divided by s.
        """
        y, root = ctx.saved_tensors  # type: ignore[attr-defined]
        count, parts, share = ctx.count, ctx.parts, ctx.share  # type: ignore[attr-defined]
        others = but_channels(y)
        sums = share * torch.stack([gradient.sum(others), (gradient * y).sum(others)])
        parts.sum_(sums)
        if not share:
            return torch.zeros_like(gradient), None, None, None, None
        first, second = sums / (count * share)
        return _along(root, y) * (gradient - _along(first, y) - y * _along(second, y)), None, None, None, None


def but_channels(x: Tensor) -> list[int]:
    """All dimensions but that of the channels."""
    return [dimension for dimension in range(x.dim()) if dimension != 1]


def _along(values: Tensor, x: Tensor) -> Tensor:
    """Values of channels, as they meet x."""
    return values.view(-1, *[1] * (x.dim() - 2))
