"""BatchNorm by the statistics of a whole batch, over real processes in test_parallel.py; and by stored ones as well."""

import pytest
import torch
from torch import Tensor, nn

from sgp.training.batch_norm import BatchNormOfAll, MixedStatistics
from sgp.training.statistics import put_statistics


class Whole:
    """One process that has all of a batch."""

    share = 1.0

    def sum_(self, tensor: Tensor) -> Tensor:
        return tensor


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("shape", [(7, 4), (5, 4, 3), (3, 4, 2, 5)], ids=str)
def test_of_a_whole_batch_it_is_torchs_own(shape: tuple[int, ...], stored: bool, affine: bool, training: bool) -> None:
    torch.manual_seed(0)
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    inputs, direction = 3 + 2 * torch.randn(2, *shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    found = []
    for ours in (True, False):
        norm = kind(4, affine=affine, track_running_stats=stored, momentum=0.3).double().train(training)
        if affine:
            nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
        x = inputs.clone().requires_grad_()
        with BatchNormOfAll(Whole()) if ours else torch.enable_grad():
            # Written to, as the activations of some networks do.
            outputs = [norm(each).tanh_() for each in x]
            (outputs[0] * direction + outputs[1].square()).sum().backward()
        found.append([x.grad, *outputs, *(p.grad for p in norm.parameters()), *norm.buffers()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


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
