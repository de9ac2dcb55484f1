"""BatchNorm by the statistics of a whole batch; over real processes in test_parallel.py."""

import pytest
import torch
from torch import Tensor, nn

from sgp.training.batch_norm import BatchNormOfAll


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
