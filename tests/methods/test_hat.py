"""HAT: masks, gates and gradients are those of its formulas, and nothing of an old task moves."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgp.methods import Batch, Moment
from sgp.methods.hat import HAT, HATSettings
from sgp.networks import MLP, AlexNet, LeNet, ResNet18

IMAGE = (3, 32, 32)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP((12, 16, 8), (3, 2)),
    "lenet": lambda: LeNet(heads=(3, 2)),
    "alexnet": lambda: AlexNet(heads=(3, 2)),
    "alexnet-stored": lambda: AlexNet(heads=(3, 2), statistics="stored"),
    "resnet18": lambda: ResNet18(IMAGE, (3, 2)),
    "resnet18-stored": lambda: ResNet18(IMAGE, (3, 2), statistics="stored"),
}


def make_method(kind: str = "mlp", **settings: Any) -> HAT:
    torch.manual_seed(0)
    return HAT(NETWORKS[kind](), HATSettings(**settings), exclude=["heads.*"])


def make_batch(task: int, shape: tuple[int, ...] = (12,), count: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(task)
    return torch.randn(count, *shape, generator=generator), torch.arange(count) % (3, 2)[task]


def get_shape(kind: str) -> tuple[int, ...]:
    return (12,) if kind == "mlp" else IMAGE


def learn(method: HAT, head: int, shape: tuple[int, ...], *, steps: int = 3, lr: float = 0.3) -> None:
    """Train on a task as the trainer does, without consolidation."""
    batch = make_batch(head, shape)
    torch.manual_seed(head)
    method.begin_task(head, [batch])
    optimizer = torch.optim.SGD(method.trained_module.parameters(), lr=lr)
    method.attach(optimizer)
    method.network.train()
    for step in range(steps):
        method.step(batch, head, Moment(0, step / steps, step / steps), optimizer)


def consolidate(method: HAT) -> None:
    method.consolidate([], lambda batch: batch[0])


@torch.no_grad()
def get_logits(method: HAT, head: int, shape: tuple[int, ...]) -> Tensor:
    method.network.eval()
    return method.compute_logits(make_batch(head, shape)[0], head)


@pytest.mark.parametrize("kind", NETWORKS)
def test_nothing_of_an_old_task_moves_with_hard_masks(kind: str) -> None:
    method, shape = make_method(kind, test_masks="hard"), get_shape(kind)
    learn(method, 0, shape)
    consolidate(method)
    before = get_logits(method, 0, shape)
    weights = {name: method._get_layer(name).weight.clone() for name in method._list_protected()}
    learn(method, 1, shape)
    assert torch.equal(get_logits(method, 0, shape), before)
    for name, weight in weights.items():
        closed = method._compute_closed(name).reshape(weight.shape[:2]).bool()
        assert 0 < closed.float().mean() < 1, name
        now = method._get_layer(name).weight
        assert torch.equal(now[closed], weight[closed]), name
        assert not torch.equal(now, weight), name
    consolidate(method)
    assert torch.equal(get_logits(method, 0, shape), before)
    # Otherwise the equality would say nothing.
    assert before.abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["mlp", "resnet18"])
def test_soft_masks_keep_old_outputs_as_far_as_they_are_0_or_1(kind: str) -> None:
    method, shape = make_method(kind), get_shape(kind)
    learn(method, 0, shape)
    with torch.no_grad():
        # At least 0.1 from the middle: a mask is then within 4e-18 of 0 or 1.
        for embedding in method._get_embeddings("0"):
            embedding.copy_(torch.where(embedding > 0, embedding.clamp(min=0.1), embedding.clamp(max=-0.1)))
    consolidate(method)
    before = get_logits(method, 0, shape)
    learn(method, 1, shape)
    assert torch.allclose(get_logits(method, 0, shape), before, atol=1e-6, rtol=1e-5)


def compute_loss_literally(method: HAT, leaves: list[Tensor], batch: Batch, slope: float, past: list[Tensor]) -> Tensor:
    """Compute HAT's loss on the perceptron, written out."""
    w1, b1, w2, b2, w3, b3, e1, e2 = leaves
    x, labels = batch
    a1, a2 = torch.sigmoid(slope * e1), torch.sigmoid(slope * e2)
    h1 = F.relu(x @ w1.T + b1) * a1
    h2 = F.relu(h1 @ w2.T + b2) * a2
    new = (a1 * (1 - past[0])).sum() + (a2 * (1 - past[1])).sum()
    left = (1 - past[0]).sum() + (1 - past[1]).sum()
    return F.cross_entropy(h2 @ w3.T + b3, labels) + method.settings.sparsity * new / left


def test_a_step_is_that_of_the_formulas() -> None:
    method, batch, smax, lr = make_method(smax=50.0, sparsity=2.0), make_batch(1), 50.0, 0.1
    method.begin_task(0, [make_batch(0)])
    consolidate(method)
    past = [torch.rand(16), torch.rand(8)]
    method.past = {"hidden.0": past[0], "hidden.1": past[1]}
    method.begin_task(1, [batch])
    moment = Moment(epoch=1, share_of_epoch=0.03, share_of_task=0.7)
    slope = 1 / smax + (smax - 1 / smax) * 0.03
    net: Any = method.network
    own = [net.hidden[0].weight, net.hidden[0].bias, net.hidden[1].weight, net.hidden[1].bias]
    own += [net.heads[1].weight, net.heads[1].bias, *method._get_embeddings("1")]
    leaves = [each.detach().clone().requires_grad_() for each in own]
    compute_loss_literally(method, leaves, batch, slope, past).backward()  # type: ignore[no-untyped-call]
    gates: list[Any] = [
        1 - past[0].unsqueeze(1),  # the network's own input is always there
        1 - past[0],
        1 - torch.minimum(past[1].unsqueeze(1), past[0].unsqueeze(0)),
        1 - past[1],
        1.0,
        1.0,
    ]
    for e in leaves[6:]:
        gates.append(smax / slope * (torch.cosh(slope * e) + 1) / (torch.cosh(e) + 1))
    wanted = [(leaf - lr * gate * leaf.grad).detach() for leaf, gate in zip(leaves, gates, strict=True)]
    method.step(batch, 1, moment, torch.optim.SGD(method.trained_module.parameters(), lr=lr))
    for number, (ours, theirs) in enumerate(zip(own, wanted, strict=True)):
        expected = theirs.clamp(-6, 6) if number >= 6 else theirs
        assert torch.allclose(ours, expected, atol=1e-6, rtol=1e-5), number


def test_the_slope_rises_in_each_epoch_and_is_largest_at_test_time() -> None:
    method = make_method(smax=100.0)
    method.begin_task(0, [make_batch(0)])
    assert method.compute_slope(Moment(3, 0.0, 0.5)) == pytest.approx(0.01)
    assert method.compute_slope(Moment(0, 0.5, 0.0)) == pytest.approx(0.5 * (100 + 0.01))
    e = method._get_embeddings("0")[0]
    assert torch.equal(method.compute_masks(0)["hidden.0"], torch.sigmoid(100 * e))
    assert torch.equal(method.compute_masks(0, 0.5)["hidden.0"], torch.sigmoid(0.5 * e))


def test_embeddings_stay_in_their_limits_and_compensation_does_not_overflow() -> None:
    method = make_method(embedding_limit=0.5)
    learn(method, 0, (12,), steps=4, lr=10.0)
    assert max(float(e.detach().abs().max()) for e in method._get_embeddings("0")) == 0.5
    method = make_method(smax=4000.0, cosh_limit=50.0)
    learn(method, 0, (12,), steps=4, lr=10.0)
    assert all(bool(e.isfinite().all()) for e in method._get_embeddings("0"))


def test_the_gradient_is_cut_to_its_norm() -> None:
    method = make_method(clip_norm=1e-3)
    method.begin_task(0, [make_batch(0)])
    before = {name: value.clone() for name, value in method.trained_module.state_dict().items()}
    method.step(make_batch(0), 0, Moment(0, 0.5, 0.5), torch.optim.SGD(method.trained_module.parameters(), lr=1.0))
    moved = [value - before[name] for name, value in method.trained_module.state_dict().items()]
    assert math.sqrt(sum(float(each.square().sum()) for each in moved)) == pytest.approx(1e-3, rel=1e-2)


def test_only_the_embeddings_of_the_task_are_trained() -> None:
    method = make_method()
    learn(method, 0, (12,))
    consolidate(method)
    first = [e.clone() for e in method._get_embeddings("0")]
    learn(method, 1, (12,))
    assert all(torch.equal(one, other) for one, other in zip(first, method._get_embeddings("0"), strict=True))
    requires_grad = {head: {e.requires_grad for e in method._get_embeddings(head)} for head in ("0", "1")}
    assert requires_grad == {"0": {False}, "1": {True}}


def test_the_past_is_the_largest_mask_of_all_tasks() -> None:
    method = make_method()
    for head in (0, 1):
        learn(method, head, (12,))
        consolidate(method)
    for name, past in method.past.items():
        assert torch.equal(past, torch.maximum(method.compute_masks(0)[name], method.compute_masks(1)[name]))


def test_a_full_network_still_takes_a_step() -> None:
    method = make_method()
    learn(method, 0, (12,))
    consolidate(method)
    method.past = {name: torch.ones_like(mask) for name, mask in method.past.items()}
    assert set(method.measure_free().values()) == {0.0}
    before = {name: value.clone() for name, value in method.network.state_dict().items()}
    learn(method, 1, (12,))
    after = method.network.state_dict()
    assert {name.split(".")[0] for name in after if not torch.equal(after[name], before[name])} == {"heads"}


def test_sparsity_leaves_more_units_free() -> None:
    free = []
    for sparsity in (0.0, 0.3):
        method = make_method(sparsity=sparsity)
        learn(method, 0, (12,), steps=20)
        consolidate(method)
        free.append(method.measure_free()["hidden.1"])
    assert 0 < free[0] < free[1] < 1


def test_bytes_are_those_of_the_embeddings_masks_and_statistics() -> None:
    method = make_method()
    assert method.count_bytes() == {"embeddings": 0, "masks": 0}
    for head in (0, 1):
        learn(method, head, (12,))
        consolidate(method)
    assert method.count_bytes() == {"embeddings": 4 * 2 * (16 + 8), "masks": 4 * (16 + 8)}
    parameters = sum(each.numel() for each in method.network.parameters())
    assert method.compute_capacity() == pytest.approx(100 * (1 + 48 / parameters))
    method = make_method("resnet18-stored")
    learn(method, 0, IMAGE, steps=1)
    consolidate(method)
    buffers = sum(buffer.nbytes for buffer in method.network.buffers())
    assert method.count_bytes()["statistics"] == buffers > 0


def test_each_example_has_the_masks_of_its_own_head() -> None:
    method = make_method()
    for head in (0, 1):
        learn(method, head, (12,))
        consolidate(method)
    method.network.eval()
    inputs, heads = make_batch(0)[0], torch.tensor([0, 1, 1, 0, 1, 0])
    mixed = method.network(inputs, heads)
    for row, head in enumerate(heads.tolist()):
        alone = method.network(inputs[row : row + 1], head)
        assert torch.allclose(mixed[row : row + 1, : alone.shape[1]], alone, atol=1e-6)


def test_tasks_that_share_a_head_share_its_masks_and_the_head_is_protected() -> None:
    torch.manual_seed(0)
    method = HAT(MLP((12, 16, 8), (3,)), HATSettings(sparsity=0.0))
    learn(method, 0, (12,))
    consolidate(method)
    assert method.measure_free().keys() == {"hidden.0", "hidden.1", "heads.0"}
    net: Any = method.network
    head, open_units = net.heads[0].weight.clone(), method.past["hidden.1"] == 1
    assert 0 < open_units.sum() < 8
    learn(method, 0, (12,))
    assert list(method._embeddings) == ["0"]
    assert torch.equal(net.heads[0].weight[:, open_units], head[:, open_units])
    assert not torch.equal(net.heads[0].weight, head)


def test_a_network_without_hidden_layers_has_nothing_to_mask() -> None:
    torch.manual_seed(0)
    method = HAT(MLP((12,), (3, 2)), HATSettings(), exclude=["heads.*"])
    for head in (0, 1):
        learn(method, head, (12,))
        consolidate(method)
    assert (method.measure_free(), method.count_bytes()) == ({}, {"embeddings": 0, "masks": 0})


def test_a_run_forgets_nothing(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="the settings come from YAML files; of the extra 'benchmarks'")
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra 'benchmarks'")
    from experiments.small import run, small

    config = small("hat", epochs=3, test_masks="hard", schedule="patience", patience=1)
    whole = run(tmp_path, config)
    assert whole.accuracies[0][0] > 90
    assert all(row[0] == whole.accuracies[0][0] for row in whole.accuracies)
    assert whole.accuracies[2][1] == whole.accuracies[1][1]
