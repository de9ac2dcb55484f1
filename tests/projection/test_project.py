"""The change of a weight that somebody edits by hand, projected as a step would."""

import math

import pytest
import torch
from torch import Tensor, nn

import sgp


class Tied(nn.Module):
    """An output layer that has the weight of the embedding, and two linear layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
        self.out.weight = self.words.weight
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.out(self.second(self.first(self.words(tokens)).relu()))
        return result


def as_a_step_does(memory: sgp.GradientMemory, weight: nn.Parameter, change: Tensor) -> Tensor:
    """A change that an optimizer has applied, after the projection."""
    optimizer = torch.optim.SGD([weight], lr=1.0)
    hook = memory.attach(optimizer, mode="step")
    before = weight.detach().clone()
    weight.grad = -change
    optimizer.step()
    hook.detach()
    return weight.detach() - before


@pytest.mark.parametrize("names", [["words", "out"], ["first", "second"]])
def test_the_change_of_a_tied_weight_is_projected_for_all_inputs_that_meet_it(names: list[str]) -> None:
    torch.manual_seed(0)
    model = Tied()
    memory = sgp.GradientMemory(model, threshold=0.95, alpha=2.0)
    memory.update([torch.tensor([[0, 1, 2], [2, 3, 3]])])
    weight = model.get_parameter(f"{names[0]}.weight")
    change = torch.randn_like(weight)
    wanted = as_a_step_does(memory, weight, change)
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


def test_a_module_of_several_weights_is_told_which_names_there_are() -> None:
    attention = nn.MultiheadAttention(8, 2, kdim=6)
    memory = sgp.GradientMemory(attention, threshold=0.95)
    with pytest.raises(ValueError, match=r"several weights: give the change of one of \(model\):query"):
        memory.project(torch.zeros(8, 8), "(model)", bias=torch.zeros(24))


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_all_weights_go_a_share_of_the_way_to_where_the_projected_change_has_them(share: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4, bias=False), nn.Linear(4, 2))
    memory = sgp.GradientMemory(model, threshold=0.9, alpha=2.0, exclude=["3"])
    memory.update([torch.randn(20, 6)])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    moved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change = {name: moved[name] - before[name] for name in moved}
    first = memory.project(change["0.weight"], "0", change["0.bias"])
    wanted = {"0.weight": first[0], "0.bias": first[1], "2.weight": memory.project(change["2.weight"], "2")}
    assert all(not torch.allclose(wanted[name], change[name], atol=0.01) for name in wanted)
    memory.project_since(before, share)
    for name, parameter in model.named_parameters():
        expected = change[name].lerp(wanted.get(name, change[name]), share)
        torch.testing.assert_close(parameter.detach() - before[name], expected, atol=1e-6, rtol=1e-5)


def test_the_change_of_a_tied_weight_since_then_is_projected_once_for_all_its_inputs() -> None:
    torch.manual_seed(0)
    model = Tied()
    memory = sgp.GradientMemory(model, threshold=0.95, alpha=2.0)
    memory.update([torch.tensor([[0, 1, 2], [2, 3, 3]])])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    changes = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    wanted = {name: as_a_step_does(memory, model.get_parameter(name), changes[name]) for name in changes}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name] + changes[name])
    memory.project_since(before)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach() - before[name], wanted[name], atol=1e-6, rtol=1e-5)


def test_a_share_out_of_range_and_a_weight_that_is_not_given_are_told() -> None:
    model = nn.Linear(3, 2)
    memory = sgp.GradientMemory(model, threshold=0.9)
    memory.update([torch.randn(9, 3)])
    weights = dict(model.named_parameters())
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="share must be in"):
            memory.project_since(weights, share)
    with pytest.raises(ValueError, match="before lacks what is protected: bias"):
        memory.project_since({"weight": weights["weight"]})
