"""Heads of earlier tasks answer to a later task's inputs as they did before it."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from projection.team import processes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sgp
from sgp.projection.realign import RIDGE


class Net(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 6))
        self.heads = nn.ModuleList(nn.Linear(6, 3, bias=bias) for _ in range(3))

    def forward(self, x: Tensor, task: int) -> Tensor:
        logits: Tensor = self.heads[task](self.body(x))
        return logits


def inputs(task: int, count: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(task)
    return torch.randn(count, 8, generator=generator) + task / 2


def train(model: Net, optimizer: torch.optim.Optimizer, task: int) -> None:
    x = inputs(task)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, task), (x.sum(1) > 4 * task).long() + (x[:, 0] > 0)).backward()
        optimizer.step()


def learned(**options: Any) -> tuple[Net, sgp.GradientMemory]:
    """A model that has learned two tasks, of which the memory knows the first."""
    torch.manual_seed(0)
    model = Net(bias=options.pop("bias", True))
    memory = sgp.GradientMemory(model, threshold=0.8, alpha=1.0, exclude=["heads.*"], **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    memory.attach(optimizer)
    train(model, optimizer, 0)
    memory.update([inputs(0)], forward=lambda x: model(x, 0))
    train(model, optimizer, 1)
    return model, memory


def of(model: Net) -> Callable[[Any], Tensor]:
    return lambda batch: model.body(batch if isinstance(batch, Tensor) else batch[0])


def heads(model: Net) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.heads.state_dict().items()}


@pytest.mark.parametrize("bias", [False, True])
def test_the_change_is_that_of_the_formula(bias: bool) -> None:
    model, memory = learned(bias=bias)
    before = copy.deepcopy(model)
    assert memory._anchor is not None
    before.load_state_dict(memory._anchor)
    model.eval()
    before.eval()
    with torch.no_grad():
        X, head = model.body(inputs(1)).double(), copy.deepcopy(model.heads[0]).double()
        wanted = before(inputs(1), 0).double()
        W = head.weight
        if bias:
            X, W = torch.cat([X, torch.ones(64, 1)], dim=1), torch.cat([W, head.bias[:, None]], dim=1)
        r = RIDGE * X.square().sum(0).mean()
        D = torch.linalg.inv(X.T @ X + r * torch.eye(X.shape[1])) @ X.T @ (wanted - X @ W.T)
    memory.realign(model.heads[0], inputs(1).split(20), features=of(model))
    found = torch.cat([model.heads[0].weight, *([model.heads[0].bias[:, None]] if bias else [])], dim=1)
    torch.testing.assert_close(found.double(), W + D.T, atol=1e-5, rtol=0)


def test_a_drift_that_a_head_can_follow_is_undone_for_inputs_that_were_not_seen() -> None:
    model, memory = learned()
    memory.update([inputs(1)], forward=lambda x: model(x, 1))
    model.eval()
    wanted = model(inputs(0), 0).detach()
    mixing = torch.eye(6) + torch.randn(6, 6) / 6
    with torch.no_grad():
        for parameter in model.body[4].parameters():
            parameter.copy_(mixing @ parameter)
    lost = (model(inputs(0), 0) - wanted).norm()
    memory.realign([model.heads[0]], [inputs(2, 500)], features=of(model))
    assert (model(inputs(0), 0) - wanted).norm() < lost / 2  # the ridge holds back a part


def test_batches_may_come_in_any_order_and_the_model_is_as_it_was_but_for_the_heads() -> None:
    model, memory = learned()
    again = copy.deepcopy(heads(model))
    own, flags = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    data = TensorDataset(inputs(1), torch.zeros(64))
    state = torch.get_rng_state()
    memory.realign(model.heads[:1], DataLoader(data, batch_size=16, shuffle=True), features=of(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == flags
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, own[name])}
    assert changed == {"heads.0.weight", "heads.0.bias"}
    shuffled = heads(model)
    model.heads.load_state_dict(again)
    memory.realign(model.heads[:1], DataLoader(data, batch_size=64), features=of(model))
    torch.testing.assert_close(heads(model), shuffled, atol=1e-5, rtol=0)
    memory.update([inputs(1)], forward=lambda x: model(x, 1))


def test_nothing_has_moved_right_after_an_update() -> None:
    model, memory = learned()
    memory.update([inputs(1)], forward=lambda x: model(x, 1))
    own = heads(model)
    memory.realign(model.heads[:2], [inputs(2)], features=of(model))
    torch.testing.assert_close(heads(model), own, atol=1e-6, rtol=0)
    memory.realign([], [inputs(2)], features=of(model))  # as in a first task


def test_other_weights_can_be_given_to_go_back_to() -> None:
    model, memory = learned(anchor=False)
    with pytest.raises(RuntimeError, match="pass reference="):
        memory.realign(model.heads[0], [inputs(1)], features=of(model))
    reference = copy.deepcopy(model.state_dict())
    own = heads(model)
    memory.realign(model.heads[0], [inputs(1)], features=of(model), reference=reference)
    torch.testing.assert_close(heads(model), own, atol=1e-6, rtol=0)


def test_what_cannot_be_realigned_is_refused_and_nothing_changes() -> None:
    model, memory = learned()
    own = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"'body\.4' is a protected layer, not a head: name it in exclude="):
        memory.realign(model.body[4], [inputs(1)], features=of(model))
    with pytest.raises(TypeError, match=r"heads must be nn\.Linear layers of the model, got Linear"):
        memory.realign(nn.Linear(6, 3), [inputs(1)], features=of(model))
    with pytest.raises(TypeError, match=r"heads must be nn\.Linear layers of the model, got Tanh"):
        memory.realign([model.body[2]], [inputs(1)], features=of(model))
    with pytest.raises(ValueError, match=r"features must give what the heads read, \[n, 6\]; got shape \(64, 8\)"):
        memory.realign(model.heads[0], [inputs(1)], features=lambda batch: batch)
    with pytest.raises(ValueError, match="the batches gave no input"):
        memory.realign(model.heads[0], [], features=of(model))
    assert all(torch.equal(tensor, own[name]) for name, tensor in model.state_dict().items())


def process(out: str, mode: str) -> None:
    """What one of the processes does, with every other input."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, memory = learned()
    memory.realign(model.heads[:1], inputs(1)[rank::2].split(10), features=of(model))
    torch.save(heads(model), Path(out) / f"{rank}.pt")
    (Path(out) / f"{rank}.json").write_text("{}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_fit_the_heads_of_a_single_one(tmp_path: Path) -> None:
    processes(__file__, tmp_path, "")
    model, memory = learned()
    memory.realign(model.heads[:1], [inputs(1)], features=of(model))
    ours, theirs = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    for name, tensor in heads(model).items():
        assert torch.equal(ours[name], theirs[name])
        torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=0)


if __name__ == "__main__":
    process(sys.argv[1], sys.argv[2])
