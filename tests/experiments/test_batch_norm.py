"""BatchNorm by the statistics of a batch and stored ones together."""

import pytest
import torch
from torch import Tensor, nn

from sgp.experiments.batch_norm import MixedStatistics
from sgp.experiments.norm_policy import put_statistics


@pytest.mark.parametrize("shape", [(7, 3), (7, 3, 4, 5), (1, 3)])
def test_mixed_ones_are_those_of_the_stored_examples_and_the_batch_in_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    stored, batch = 2 * torch.randn(20, *shape[1:]) + 1, torch.randn(*shape) - 1
    norm = (nn.BatchNorm1d(3) if len(shape) == 2 else nn.BatchNorm2d(3)).eval()
    others = [0, *range(2, len(shape))]
    variance, mean = torch.var_mean(stored, others, correction=0)
    put_statistics(norm, {"running_mean": mean, "running_var": variance})
    alone = norm(batch)
    with MixedStatistics(20):
        mixed = norm(batch)
        norm.train()
        by_the_batch = nn.functional.batch_norm(batch, None, None, training=True) if len(batch) > 1 else None
    torch.testing.assert_close(mixed, norm_by(torch.cat([stored, batch]), batch, others))
    if by_the_batch is not None:  # in training nothing is mixed
        torch.testing.assert_close(by_the_batch, norm_by(batch, batch, others))
    torch.testing.assert_close(norm.eval()(batch), alone)
    torch.testing.assert_close(norm.running_mean, mean)


def norm_by(whole: Tensor, x: Tensor, others: list[int]) -> Tensor:
    """x, normalised by the statistics of the whole."""
    variance, mean = torch.var_mean(whole, others, correction=0, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt()
