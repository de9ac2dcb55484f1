"""What BatchNorm goes by, where that is not what its modules have at hand.

Modules stay as they are: while one of these modes is entered, the function that they all call is answered by it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

NAMES = inspect.signature(F.batch_norm)


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


def but_channels(x: Tensor) -> list[int]:
    """All dimensions but that of the channels."""
    return [dimension for dimension in range(x.dim()) if dimension != 1]
