"""Heads of earlier tasks answer to a later task's examples as they did before it."""

import copy

import pytest
import torch
from torch import Tensor, nn

from sgp.experiments.realign import compute_logits, realign
from sgp.networks.heads import Heads


class Network(nn.Module):
    """A linear body, with BatchNorm and dropout if asked for, and heads."""

    def __init__(self, *, bias: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5, bias=False)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.dropout = nn.Dropout(0.5)
        self.heads = Heads(5, (2, 3, 4), bias=bias)

    def forward(self, x: Tensor, task: int) -> Tensor:
        logits: Tensor = self.heads(self.dropout(self.norm(self.body(x))), task)
        return logits


def batches(count: int = 4) -> list[Tensor]:
    return [torch.randn(16, 6) for _ in range(count)]


def test_a_drift_that_a_head_can_follow_is_undone_for_inputs_that_were_not_seen() -> None:
    torch.manual_seed(0)
    network, unseen = Network(bias=True).eval(), torch.randn(50, 6)
    before = network(unseen, 0).detach()
    inputs = batches(count=20)
    wanted = compute_logits(network, [0], inputs, 2)
    with torch.no_grad():
        network.body.weight.copy_((torch.eye(5) + torch.randn(5, 5) / 5) @ network.body.weight)
    lost = (network(unseen, 0) - before).norm()
    for _ in range(20):  # each time the ridge holds back less
        realign(network, [0], wanted, inputs, 2)
    assert (network(unseen, 0) - before).norm() < lost / 20


@pytest.mark.parametrize("training", [True, False])
def test_the_network_is_as_before_but_for_the_heads(training: bool) -> None:
    torch.manual_seed(0)
    network, inputs = Network(norm=True).train(training), batches()
    own = copy.deepcopy(network.state_dict())
    wanted = compute_logits(network, [0], inputs, 2)
    realign(network, [0], 2 * wanted, inputs, 2)
    changed = {name for name, tensor in network.state_dict().items() if not torch.equal(tensor, own[name])}
    assert changed == {"heads.0.weight"}
    assert all(module.training is training for module in network.modules())
    assert not any(module._forward_pre_hooks for module in network.modules())


def test_batch_norm_goes_by_the_batch() -> None:
    torch.manual_seed(0)
    network, inputs = Network(norm=True), torch.randn(16, 6) + 3
    found = compute_logits(network, [1], [inputs], 2)
    x = network.body(inputs)
    x = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(found, (x @ network.heads[1].weight.T).detach())
