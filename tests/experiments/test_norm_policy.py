"""Stored statistics of BatchNorm are those of the weights as they are, with dropout off."""

import pytest
import torch
from torch import Tensor, nn

from sgp.experiments.norm_policy import TaskStatistics, estimate_statistics, put_statistics
from sgp.networks import AlexNet


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
    before = {name: value.clone() for name, value in network.state_dict().items()}
    found = estimate_statistics(network, [(batch, 0) for batch in batches])
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(module.training for module in network.modules())
    put_statistics(network, found)
    inputs = [batch.amax(dim=2) for batch in batches]
    torch.testing.assert_close(network.norm.running_mean, torch.stack([each.mean(0) for each in inputs]).mean(0))
    torch.testing.assert_close(network.norm.running_var, torch.stack([each.var(0) for each in inputs]).mean(0))


def test_they_are_those_that_torch_gathers() -> None:
    torch.manual_seed(0)
    network, images = AlexNet(heads=(2,), statistics="stored"), torch.randn(12, 3, 32, 32)
    found = estimate_statistics(network, [(images[:7], 0), (images[7:], 0)])
    network.eval()
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm in norms:
        norm.train()
        norm.momentum = None  # a plain mean
    network(images[:7], 0)
    network(images[7:], 0)
    assert len(found) == 10
    for name, value in found.items():
        torch.testing.assert_close(value, network.get_buffer(name))


@pytest.mark.parametrize("training", [True, False])
def test_modes_are_as_before_even_if_the_network_fails(training: bool) -> None:
    network = Small().train(training)
    with pytest.raises(IndexError):
        estimate_statistics(network, [(torch.rand(3), 0)])
    assert all(module.training is training for module in network.modules())
    assert network.norm.track_running_stats


def test_a_network_on_batch_statistics_is_not_even_run() -> None:
    network = AlexNet(heads=(2,))
    assert estimate_statistics(network, (pytest.fail("was run") for _ in range(1))) == {}


def test_a_task_answers_by_its_own_and_the_network_keeps_what_it_has() -> None:
    torch.manual_seed(0)
    network, x = Small().eval(), torch.rand(6, 3, 5)
    statistics = TaskStatistics()
    statistics.keep(1, {"norm.running_mean": torch.full((3,), 0.5), "norm.running_var": torch.full((3,), 4.0)})
    plain = network(x, 0)
    with statistics.of(1, network):
        own = network(x, 1).sum()
    torch.testing.assert_close(own, ((x.amax(dim=2) - 0.5) / (4 + 1e-5) ** 0.5).sum())
    own.backward()  # by the statistics that it was computed with, though they are gone
    with statistics.of(0, network):
        assert torch.equal(network(x, 0), plain)
    assert torch.equal(network(x, 1), plain)
    assert statistics.nbytes == 24
    again = TaskStatistics()
    again.load_state_dict(statistics.state_dict())
    with again.of(1, network):
        assert torch.equal(network(x, 1).sum(), own)


def test_they_come_back_after_an_error() -> None:
    network, statistics = Small().eval(), TaskStatistics()
    statistics.keep(0, {"norm.running_mean": torch.ones(3)})
    with pytest.raises(IndexError), statistics.of(0, network):
        network(torch.rand(3), 0)
    assert torch.equal(network.get_buffer("norm.running_mean"), torch.zeros(3))
