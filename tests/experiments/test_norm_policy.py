"""Tests of the BatchNorm statistics that tasks are evaluated with."""

import pytest
import torch
from torch import Tensor, nn

from sgp.experiments.norm_policy import MixedNorm, NormPolicy, estimate_statistics, store_statistics
from sgp.methods.method import Method, NormStatistics, NoSettings
from sgp.networks import AlexNet


class Small(nn.Module):
    """Network with dropout and a maximum before a norm, as in AlexNet."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, task: int) -> Tensor:
        out: Tensor = self.norm(self.dropout(x).amax(dim=2))
        return out


class WithStatistics(Method[NoSettings]):
    """Method that leaves the statistics to the network, to each task, or owns them."""

    kind: NormStatistics = "per-task"

    @property
    def norm_statistics(self) -> NormStatistics:
        return self.kind


def make_policy(network: nn.Module, *, has_shared_head: bool = False, mixed: bool = False) -> NormPolicy:
    return NormPolicy(WithStatistics(network, NoSettings()), mixed=mixed, has_shared_head=has_shared_head)


def test_statistics_are_means_over_the_batches() -> None:
    torch.manual_seed(0)
    network, batches = Small().train(), [torch.rand(8, 3, 5) + 2 for _ in range(4)]
    for batch in batches:
        network(batch, 0)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    found = estimate_statistics(network, [(batch, 0) for batch in batches])
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(module.training for module in network.modules())
    store_statistics(network, found)
    inputs = [batch.amax(dim=2) for batch in batches]
    torch.testing.assert_close(network.norm.running_mean, torch.stack([each.mean(0) for each in inputs]).mean(0))
    torch.testing.assert_close(network.norm.running_var, torch.stack([each.var(0) for each in inputs]).mean(0))


def test_statistics_equal_those_that_torch_accumulates() -> None:
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
def test_estimate_restores_modes_even_if_the_network_fails(training: bool) -> None:
    network = Small().train(training)
    with pytest.raises(IndexError):
        estimate_statistics(network, [(torch.rand(3), 0)])
    assert all(module.training is training for module in network.modules())
    assert network.norm.track_running_stats


def test_estimate_does_not_run_a_network_that_uses_batch_statistics() -> None:
    network = AlexNet(heads=(2,))
    assert estimate_statistics(network, (pytest.fail("was run") for _ in range(1))) == {}


def test_a_task_is_evaluated_with_its_own_statistics_and_the_network_keeps_its_own() -> None:
    torch.manual_seed(0)
    network, x = Small().eval(), torch.rand(6, 3, 5)
    policy = make_policy(network)
    plain = network(x, 0)
    policy.estimate(1, [(torch.rand(8, 3, 5) + 2, 1)])
    assert torch.equal(network(x, 1), plain)
    state = policy.state_dict()
    mean, var = state["1/norm.running_mean"], state["1/norm.running_var"]
    with policy.evaluate_task(1):
        own = network(x, 1).sum()
    torch.testing.assert_close(own, ((x.amax(dim=2) - mean) / (var + 1e-5).sqrt()).sum())
    own.backward()  # with the statistics of the forward pass, though they are no longer in place
    with policy.evaluate_task(0):
        assert torch.equal(network(x, 0), plain)
    assert torch.equal(network(x, 1), plain)
    assert policy.nbytes == 24
    resumed = make_policy(network)
    resumed.load_state_dict(state)
    with resumed.evaluate_task(1):
        assert torch.equal(network(x, 1).sum(), own)


def test_the_network_has_one_set_of_statistics_unless_each_task_has_its_own() -> None:
    torch.manual_seed(0)
    network = Small()
    policy = make_policy(network)
    policy._method.kind = "shared"  # type: ignore[attr-defined]
    policy.estimate(1, [(torch.rand(8, 3, 5) + 2, 1)])
    assert policy.state_dict() == {}
    assert bool((network.norm.running_mean > 2).all())  # type: ignore[operator]


def test_statistics_are_not_estimated_if_the_method_owns_them_or_a_shared_head_has_no_task() -> None:
    policy, shared = make_policy(Small()), make_policy(Small(), has_shared_head=True)
    assert policy.is_estimated
    assert not shared.is_estimated
    shared._method.kind = "shared"  # type: ignore[attr-defined]
    policy._method.kind = "own"  # type: ignore[attr-defined]
    assert shared.is_estimated
    assert not policy.is_estimated


def test_statistics_are_restored_after_an_error() -> None:
    network = Small().eval()
    policy = make_policy(network)
    policy.load_state_dict({"0/norm.running_mean": torch.ones(3)})
    with pytest.raises(IndexError), policy.use_statistics(0):
        network(torch.rand(3), 0)
    assert torch.equal(network.get_buffer("norm.running_mean"), torch.zeros(3))


@pytest.mark.parametrize("shape", [(7, 3), (7, 3, 4, 5), (1, 3)])
def test_mixed_statistics_are_those_of_the_stored_examples_and_the_batch_together(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    stored, batch = 2 * torch.randn(20, *shape[1:]) + 1, torch.randn(*shape) - 1
    norm = (nn.BatchNorm1d(3) if len(shape) == 2 else nn.BatchNorm2d(3)).eval()
    others = [0, *range(2, len(shape))]
    variance, mean = torch.var_mean(stored, others, correction=0)
    store_statistics(norm, {"running_mean": mean, "running_var": variance})
    plain = norm(batch)
    with MixedNorm(20):
        mixed = norm(batch)
        norm.train()
        trained = nn.functional.batch_norm(batch, None, None, training=True) if len(batch) > 1 else None
    torch.testing.assert_close(mixed, normalize(torch.cat([stored, batch]), batch, others))
    if trained is not None:  # nothing is mixed in training
        torch.testing.assert_close(trained, normalize(batch, batch, others))
    torch.testing.assert_close(norm.eval()(batch), plain)
    torch.testing.assert_close(norm.running_mean, mean)


def normalize(whole: Tensor, x: Tensor, others: list[int]) -> Tensor:
    """Normalize x by the statistics of the whole."""
    variance, mean = torch.var_mean(whole, others, correction=0, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt()
