"""Realigned heads of earlier tasks give the outputs that they gave before a later task."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from projection.process_pair import run_processes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sgp
from sgp.heads import RIDGE, fit_heads


class Net(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 6))
        self.heads = nn.ModuleList(nn.Linear(6, 3, bias=bias) for _ in range(3))

    def forward(self, x: Tensor, task: int) -> Tensor:
        logits: Tensor = self.heads[task](self.body(x))
        return logits


def make_inputs(task: int, count: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(task)
    return torch.randn(count, 8, generator=generator) + task / 2


def train(model: Net, optimizer: torch.optim.Optimizer, task: int) -> None:
    x = make_inputs(task)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, task), (x.sum(1) > 4 * task).long() + (x[:, 0] > 0)).backward()
        optimizer.step()


def make_learned(**options: Any) -> tuple[Net, sgp.GradientMemory]:
    """Return a model that has learned two tasks, and a memory of the first."""
    torch.manual_seed(0)
    model = Net(bias=options.pop("bias", True))
    memory = sgp.GradientMemory(model, threshold=0.8, alpha=1.0, exclude=["heads.*"], **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    memory.attach(optimizer)
    train(model, optimizer, 0)
    memory.update([make_inputs(0)], forward=lambda x: model(x, 0))
    train(model, optimizer, 1)
    return model, memory


def make_features(model: Net) -> Callable[[Any], Tensor]:
    return lambda batch: model.body(batch if isinstance(batch, Tensor) else batch[0])


def realign(memory: sgp.GradientMemory, heads: Any, batches: Any, features: Callable[[Any], Tensor]) -> None:
    """Realign heads with the weights as of the memory's last update as the reference."""
    sgp.heads.realign(memory.model, heads, batches, features=features, reference=memory.anchor)


def get_heads(model: Net) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.heads.state_dict().items()}


def compute_literally(X: Tensor, wanted: Tensor, W: Tensor) -> Tensor:
    """Return the result of the formula, with a ridge in proportion to the mean energy of all features."""
    r = RIDGE * X.square().sum(0).mean()
    return W + (torch.linalg.inv(X.T @ X + r * torch.eye(X.shape[1])) @ X.T @ (wanted - X @ W.T)).T


def copy_anchored(model: Net, memory: sgp.GradientMemory) -> Net:
    """Return the model as of the last update, in eval mode."""
    before = copy.deepcopy(model).eval()
    before.load_state_dict(dict(memory.anchor))
    return before


def test_the_change_agrees_with_the_formula() -> None:
    model, memory = make_learned(bias=False)
    wanted = copy_anchored(model, memory)(make_inputs(1), 0)
    model.eval()
    X, W = model.body(make_inputs(1)), model.heads[0].weight
    expected = compute_literally(X.double(), wanted.double(), W.double()).detach()
    realign(memory, model.heads[0], make_inputs(1).split(20), features=make_features(model))
    torch.testing.assert_close(model.heads[0].weight.double(), expected, atol=1e-5, rtol=0)


def test_a_bias_is_the_weight_of_a_constant_feature() -> None:
    model, memory = make_learned()
    wanted = copy_anchored(model, memory)(make_inputs(1), 0).double()
    model.eval()
    head = model.heads[0]
    X = torch.cat([model.body(make_inputs(1)), torch.ones(64, 1)], dim=1).double().detach()
    W = torch.cat([head.weight, head.bias[:, None]], dim=1).double().detach()
    ridge = torch.full((7,), float(X[:, :6].square().sum(0).mean()), dtype=torch.float64)
    ridge[6] = 64
    D = torch.linalg.inv(X.T @ X + RIDGE * ridge.diag()) @ X.T @ (wanted - X @ W.T)
    realign(memory, head, [make_inputs(1)], features=make_features(model))
    found = torch.cat([head.weight, head.bias[:, None]], dim=1).double()
    torch.testing.assert_close(found, W + D.T, atol=1e-5, rtol=0)


def fit_copies(heads: list[nn.Linear], X: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    """Return the outputs of copies of heads after a fit."""
    heads = copy.deepcopy(heads)
    fit_heads(heads, [(X, torch.cat(wanted, dim=1))])
    return [head(X).detach() for head in heads]


def test_a_fit_does_not_depend_on_the_scale_of_features_or_on_other_heads() -> None:
    torch.manual_seed(0)
    heads, X = [nn.Linear(6, 3), nn.Linear(6, 2, bias=False), nn.Linear(6, 4)], torch.randn(50, 6) + 1
    wanted = [torch.randn(50, head.out_features) for head in heads]
    together = fit_copies(heads, X, wanted)
    for head, own, found in zip(heads, wanted, together, strict=True):
        torch.testing.assert_close(fit_copies([head], X, [own])[0], found, atol=1e-5, rtol=0)
        small = copy.deepcopy(head)
        small.weight.data *= 1000
        torch.testing.assert_close(fit_copies([small], X / 1000, [own])[0], found, atol=1e-4, rtol=0)


def test_half_precision_does_not_overflow() -> None:
    torch.manual_seed(0)
    head, X = nn.Linear(6, 3).half(), (4 * torch.randn(8000, 6)).half()
    wanted = X @ torch.randn(3, 6).half().T
    fit_heads([head], zip(X.split(700), wanted.split(700), strict=True))
    assert (head(X) - wanted).norm() < wanted.norm() / 5


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_infinite_features_are_refused_and_nothing_changes(bad: float) -> None:
    model, memory = make_learned()
    own, features = get_heads(model), make_features(model)

    def spoilt(x: Tensor) -> Tensor:
        found = features(x)
        found[3, 2] = bad
        return found

    with pytest.raises(FloatingPointError, match="NaN, infinite or too large"):
        realign(memory, model.heads[0], [make_inputs(1)], features=spoilt)
    assert all(torch.equal(tensor, own[name]) for name, tensor in get_heads(model).items())


def test_a_linear_drift_is_corrected_for_unseen_inputs() -> None:
    model, memory = make_learned()
    memory.update([make_inputs(1)], forward=lambda x: model(x, 1))
    model.eval()
    wanted = model(make_inputs(0), 0).detach()
    mixing = torch.eye(6) + torch.randn(6, 6) / 6
    with torch.no_grad():
        for parameter in model.body[4].parameters():
            parameter.copy_(mixing @ parameter)
    lost = (model(make_inputs(0), 0) - wanted).norm()
    realign(memory, [model.heads[0]], [make_inputs(2, 500)], features=make_features(model))
    assert (model(make_inputs(0), 0) - wanted).norm() < lost / 2  # the ridge reduces the correction


def test_the_order_of_batches_has_no_effect_and_only_the_heads_change() -> None:
    model, memory = make_learned()
    again = get_heads(model)
    own, flags = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    data = TensorDataset(make_inputs(1), torch.zeros(64))
    state = torch.get_rng_state()
    realign(memory, model.heads[:1], DataLoader(data, batch_size=16, shuffle=True), features=make_features(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == flags
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, own[name])}
    assert changed == {"heads.0.weight", "heads.0.bias"}
    shuffled = get_heads(model)
    model.heads.load_state_dict(again)
    realign(memory, [model.heads[0]] * 2, DataLoader(data, batch_size=64), features=make_features(model))
    torch.testing.assert_close(get_heads(model), shuffled, atol=1e-5, rtol=0)
    memory.update([make_inputs(1)], forward=lambda x: model(x, 1))


def test_features_may_have_more_dimensions_and_come_from_autocast() -> None:
    found = []
    for autocast in (False, True):
        for shape in ((64, 6), (4, 16, 6)):
            model, memory = make_learned()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                realign(memory, model.heads[0], [make_inputs(1)], features=lambda x: model.body(x).view(shape))  # noqa: B023
            found.append(model.heads[0].weight.detach() - make_learned()[0].heads[0].weight.detach())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    assert (found[2] - found[0]).norm() < found[0].norm() / 5


def test_a_pending_change_is_projected_first() -> None:
    found = []
    for flushed in (False, True):
        model, memory = make_learned()
        memory.update([make_inputs(1)], forward=lambda x: model(x, 1))  # noqa: B023
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        hook = memory.attach(optimizer, every=50)
        train(model, optimizer, 2)
        if flushed:
            hook.flush()
        realign(memory, model.heads[:2], [make_inputs(2)], features=make_features(model))
        found.append(get_heads(model))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_a_reference_can_be_given() -> None:
    model, memory = make_learned()
    reference = {name: tensor.clone() for name, tensor in memory.anchor.items()}
    realign(memory, model.heads[0], [make_inputs(1)], features=make_features(model))
    bare, without = make_learned(anchor=False)
    with pytest.raises(RuntimeError, match="pass reference="):
        realign(without, bare.heads[0], [make_inputs(1)], features=make_features(bare))

    def realign_to(reference: dict[str, Tensor]) -> None:
        sgp.heads.realign(bare, bare.heads[0], [make_inputs(1)], features=make_features(bare), reference=reference)

    realign_to(reference)
    torch.testing.assert_close(get_heads(bare), get_heads(model), rtol=0, atol=0)
    with pytest.raises(ValueError, match="these are the model's own tensors"):
        realign_to(bare.state_dict())
    with pytest.raises(ValueError, match=r"reference: 'body.* is missing"):
        realign_to({"module.body.0.weight": torch.ones(1)})


def test_a_call_at_the_wrong_time_is_refused() -> None:
    model, memory = make_learned()
    realign(memory, [], [make_inputs(1)], features=make_features(model))  # as in a first task
    memory.update([make_inputs(1)], forward=lambda x: model(x, 1))
    with pytest.raises(RuntimeError, match="nothing has changed since the last update: call realign before"):
        realign(memory, model.heads[:2], [make_inputs(2)], features=make_features(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    hook = memory.attach(optimizer)
    train(model, optimizer, 2)
    with pytest.raises(
        ValueError, match=r"'heads\.2' has changed since the last update, so it is not a head of an earlier"
    ):
        realign(memory, model.heads, [make_inputs(2)], features=make_features(model))
    with hook.projected(), pytest.raises(RuntimeError, match="the compared weights would be restored"):
        realign(memory, model.heads[:2], [make_inputs(2)], features=make_features(model))


def test_invalid_heads_features_and_batches_are_refused_and_nothing_changes() -> None:
    model, memory = make_learned()
    own = copy.deepcopy(model.state_dict())
    right = {"batches": [make_inputs(1)], "features": make_features(model)}
    cases: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (ValueError, r"'body\.4' is protected, .*: exclude=\['body\.4\.\*'\]", model.body[4], right),
        (TypeError, "the head Linear.* is not a module of the model", nn.Linear(6, 3), right),
        (TypeError, r"heads must be nn\.Linear layers, got Tanh", [model.body[2]], right),
        (ValueError, "got dimensions 6 and 8", [model.heads[0], model.body[0]], right),
        (
            ValueError,
            r"the inputs of the heads, \[n, 6\]; got shape \(64, 8\)",
            model.heads[0],
            right | {"features": torch.tanh},
        ),
        (ValueError, "the inputs of the heads, .*; got tuple", model.heads[0], right | {"features": lambda x: (x,)}),
        (ValueError, "the batches have no features", model.heads[0], right | {"batches": []}),
        (ValueError, "or only zeros", model.heads[0], right | {"features": lambda x: x[:, :6] * 0}),
        (TypeError, "looks like a single batch", model.heads[0], right | {"batches": make_inputs(1)}),
    ]
    for kind, message, head, arguments in cases:
        with pytest.raises(kind, match=message):
            realign(memory, head, arguments["batches"], arguments["features"])
    assert all(torch.equal(tensor, own[name]) for name, tensor in model.state_dict().items())


def test_heads_with_shared_or_parametrized_weights_are_refused() -> None:
    model, memory = make_learned()
    model.heads[1].weight = model.heads[0].weight
    with pytest.raises(ValueError, match=r"'heads\.0' and 'heads\.1' share one weight"):
        realign(memory, model.heads[:2], [make_inputs(1)], features=make_features(model))
    nn.utils.parametrizations.weight_norm(model.heads[2])
    with pytest.raises(TypeError, match=r"the weight of 'heads\.2' is parametrized"):
        realign(memory, model.heads[2], [make_inputs(1)], features=make_features(model))


def test_a_vocabulary_may_have_grown_and_a_protected_bias_is_refused() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"words": nn.Embedding(10, 6), "head": nn.Linear(6, 3)})
    memory = sgp.GradientMemory(model, threshold=0.9, exclude=["head.*"])
    tokens = torch.randint(0, 5, (40,))
    memory.update([tokens], forward=lambda batch: model["head"](model["words"](batch)))
    wider = nn.Embedding(14, 6)
    with torch.no_grad():
        wider.weight[:10] = model["words"].weight + torch.randn(10, 6)
    model["words"] = wider
    own = model["head"].weight.detach().clone()
    realign(memory, model["head"], [tokens], features=lambda batch: model["words"](batch))
    assert not torch.equal(model["head"].weight, own)
    other = sgp.GradientMemory(model, threshold=0.9, exclude=["head.weight"])
    other.update([tokens], forward=lambda batch: model["head"](model["words"](batch)))
    with pytest.raises(ValueError, match="'head' is protected, but a head of an earlier task must be free"):
        realign(other, model["head"], [tokens], features=lambda batch: model["words"](batch))


def test_sharded_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, memory = make_learned()
    monkeypatch.setattr(sgp.heads, "find_fsdp_modules", lambda model: [model])
    with pytest.raises(ValueError, match="realign does not support sharded models"):
        realign(memory, model.heads[0], [make_inputs(1)], features=make_features(model))


def run_process(out: str, mode: str) -> None:
    """Run one of the processes, with every other input."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, memory = make_learned()
    realign(memory, model.heads[:1], make_inputs(1)[rank::2].split(10), features=make_features(model))
    torch.save(get_heads(model), Path(out) / f"{rank}.pt")
    (Path(out) / f"{rank}.json").write_text("{}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_fit_the_heads_of_a_single_process(tmp_path: Path) -> None:
    run_processes(__file__, tmp_path, "")
    model, memory = make_learned()
    realign(memory, model.heads[:1], [make_inputs(1)], features=make_features(model))
    ours, theirs = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    for name, tensor in get_heads(model).items():
        assert torch.equal(ours[name], theirs[name])
        torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=0)


if __name__ == "__main__":
    run_process(sys.argv[1], sys.argv[2])
