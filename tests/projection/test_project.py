"""Projection of a change of a weight that users edit themselves."""

import math

import pytest
import torch
from torch import Tensor, nn

import sgp


class Tied(nn.Module):
    """An output layer with the weight of the embedding, and two linear layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
        self.out.weight = self.words.weight
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.out(self.second(self.first(self.words(tokens)).relu()))
        return result


def project_by_a_step(memory: sgp.GradientMemory, weight: nn.Parameter, change: Tensor) -> Tensor:
    """Return a change that an optimizer has applied, after the projection."""
    optimizer = torch.optim.SGD([weight], lr=1.0)
    hook = memory.attach(optimizer, mode="step")
    before = weight.detach().clone()
    weight.grad = -change
    optimizer.step()
    hook.detach()
    return weight.detach() - before


@pytest.mark.parametrize("names", [["words", "out"], ["first", "second"]])
def test_the_change_of_a_tied_weight_is_projected_for_all_of_its_inputs(names: list[str]) -> None:
    torch.manual_seed(0)
    model = Tied()
    memory = sgp.GradientMemory(model, threshold=0.95, alpha=2.0)
    memory.update([torch.tensor([[0, 1, 2], [2, 3, 3]])])
    weight = model.get_parameter(f"{names[0]}.weight")
    change = torch.randn_like(weight)
    wanted = project_by_a_step(memory, weight, change)
    for name in names:
        found = memory.project(change, name)
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["0", "0:query", "0:key", "0:value"])
def test_the_change_of_a_packed_weight_is_projected_for_query_key_and_value(name: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.MultiheadAttention(8, 2, batch_first=True)])
    attention = model[0]
    memory = sgp.GradientMemory(model, threshold=0.95, alpha=math.inf)
    texts = torch.randn(3, 2, 3, 8)
    memory.update([texts], forward=lambda batch: attention(*batch))
    change, shift = torch.randn(24, 8), torch.randn(24)
    found, moved = memory.project(change, name, bias=shift)
    for part, rows in zip(("query", "key", "value"), (slice(0, 8), slice(8, 16), slice(16, 24)), strict=True):
        blocked = memory.subspaces[f"0:{part}"]
        assert blocked.compute_blocked_share(change[rows].unsqueeze(0), shift[rows].unsqueeze(0)) > 0.1
        assert blocked.compute_blocked_share(found[rows].unsqueeze(0), moved[rows].unsqueeze(0)) < 1e-6
    out = memory.project(torch.zeros(8, 8), "0.out_proj", bias=torch.zeros(8))
    assert not torch.cat([out[0], out[1].unsqueeze(0)]).any()


def test_the_error_for_a_module_with_several_weights_lists_their_names() -> None:
    attention = nn.MultiheadAttention(8, 2, kdim=6)
    memory = sgp.GradientMemory(attention, threshold=0.95)
    with pytest.raises(ValueError, match=r"several weights: pass the name of one of \(model\):query"):
        memory.project(torch.zeros(8, 8), "(model)", bias=torch.zeros(24))


def test_an_edit_by_hand_is_what_later_checks_and_updates_begin_with() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    memory = sgp.GradientMemory(model, threshold=0.95)
    x = torch.randn(8, 6)
    memory.update([x])
    with memory.edit_weights(), torch.no_grad():
        model[0].weight.mul_(2)
    assert memory.check(x).drift == 0
    memory.update([x])
    assert memory.tasks == 2


def test_an_edit_can_exclude_layers_and_drops_their_bases() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    memory = sgp.GradientMemory(model, threshold=0.95, alpha=math.inf)
    memory.update([torch.randn(8, 6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    memory.attach(optimizer)
    kept = memory.subspaces["0"]
    with memory.edit_weights(exclude=["1"]):
        pass
    assert memory.exclude == ("1",)
    assert list(memory.layers) == ["0"]
    assert memory.subspaces["0"] is kept
    before = model[1].weight.detach().clone()
    model(torch.randn(8, 6)).square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(model[1].weight, before - model[1].weight.grad)
