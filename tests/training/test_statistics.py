"""Stored statistics of BatchNorm are those of the weights as they are, with dropout off."""

import pytest
import torch
from torch import Tensor, nn

from sgp.networks import AlexNet
from sgp.training.statistics import estimate_statistics


class Small(nn.Module):
    """Dropout and a maximum before a norm, as in AlexNet."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, task: int) -> Tensor:
        out: Tensor = self.norm(self.dropout(x).amax(dim=2))
        return out


def test_they_are_the_means_over_the_batches() -> None:
    torch.manual_seed(0)
    network, batches = Small().train(), [torch.rand(8, 3, 5) + 2 for _ in range(4)]
    for batch in batches:
        network(batch, 0)
    momentum = network.norm.momentum
    estimate_statistics(network, [(batch, 0) for batch in batches])
    inputs = [batch.amax(dim=2) for batch in batches]
    torch.testing.assert_close(network.norm.running_mean, torch.stack([each.mean(0) for each in inputs]).mean(0))
    torch.testing.assert_close(network.norm.running_var, torch.stack([each.var(0) for each in inputs]).mean(0))
    assert network.norm.momentum == momentum
    assert all(module.training for module in network.modules())


@pytest.mark.parametrize("training", [True, False])
def test_modes_are_as_before_even_if_the_network_fails(training: bool) -> None:
    network = Small().train(training)
    with pytest.raises(IndexError):
        estimate_statistics(network, [(torch.rand(3), 0)])
    assert all(module.training is training for module in network.modules())
    assert network.norm.momentum == 0.1


def test_a_network_on_batch_statistics_is_not_even_run() -> None:
    network = AlexNet(heads=(2,))
    estimate_statistics(network, (pytest.fail("was run") for _ in range(1)))
