"""OWM: projectors equal their closed form, and steps do not change outputs for old mean inputs."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgp.methods import Batch, Moment
from sgp.methods.owm import OWM, OWMSettings, shrink_projector
from sgp.networks import MLP, AlexNet, LeNet, ResNet18

IMAGE = (3, 32, 32)


def make_method(network: nn.Module | None = None, exclude: tuple[str, ...] = ("heads.*",), **settings: Any) -> OWM:
    torch.manual_seed(0)
    return OWM(network or MLP((12, 16, 8), (3, 2)), OWMSettings(**settings), exclude=exclude)


def make_batches(task: int, shape: tuple[int, ...] = (12,), count: int = 12) -> list[Batch]:
    """Return batches of a task whose inputs have a mean of their own."""
    generator = torch.Generator().manual_seed(task)
    centre = 3 * torch.randn(1, *shape, generator=generator)
    inputs = centre + torch.randn(count, *shape, generator=generator)
    labels = torch.arange(count) % (3, 2)[task]
    return list(zip(inputs.split(4), labels.split(4), strict=True))


def learn(method: OWM, head: int, batches: list[Batch], *, epochs: int = 1, lr: float = 0.1) -> None:
    torch.manual_seed(head)
    method.begin_task(head, batches)
    optimizer = torch.optim.SGD(method.trained_module.parameters(), lr=lr)
    method.attach(optimizer)
    method.network.train()
    steps = epochs * len(batches)
    for step, batch in enumerate(batches * epochs):
        method.step(batch, head, Moment(0, 0.0, step / steps), optimizer)


def consolidate(method: OWM, head: int, batches: list[Batch]) -> None:
    def log_likelihood(batch: Batch) -> Tensor:
        return -F.cross_entropy(method.compute_logits(batch[0], head), batch[1], reduction="none")

    method.consolidate(batches, log_likelihood)


def shrink_one_by_one(projector: Tensor, rows: Tensor, alpha: float) -> Tensor:
    """Apply OWM's recursion as published, row by row."""
    for r in rows:
        k = projector @ r
        projector = projector - torch.outer(k, k) / (alpha + r @ k)
    return projector


@pytest.mark.parametrize("count", [1, 5, 7, 30])
def test_all_rows_at_once_are_one_after_another_and_the_closed_form(count: int) -> None:
    torch.manual_seed(0)
    alpha, d = 0.03, 7
    rows = torch.randn(2, count, d, dtype=torch.float64)
    projector = torch.eye(d, dtype=torch.float64).repeat(2, 1, 1)
    shrink_projector(projector, rows[:, : count // 2], alpha)
    shrink_projector(projector, rows[:, count // 2 :], alpha)
    for group in (0, 1):
        a = rows[group].T
        closed = alpha * torch.linalg.inv(a @ a.T + alpha * torch.eye(d, dtype=torch.float64))
        assert torch.allclose(projector[group], closed, atol=1e-12)
        recursive = shrink_one_by_one(torch.eye(d, dtype=torch.float64), rows[group], alpha)
        assert torch.allclose(projector[group], recursive, atol=1e-12)


def test_projectors_of_a_run_equal_the_closed_form_of_its_mean_inputs() -> None:
    method, alpha = make_method(alpha_start=0.2, alpha_decay=1.0), 0.2
    net: Any = method.network
    columns: list[Tensor] = []
    for task in (0, 1):
        learn(method, task, make_batches(task))
        for inputs, _ in make_batches(task):
            hidden = net.hidden[0](inputs).relu().detach()
            columns.append(torch.cat([hidden.double().mean(dim=0), torch.ones(1, dtype=torch.float64)]))
        consolidate(method, task, make_batches(task))
    a = torch.stack(columns, dim=1)
    closed = alpha * torch.linalg.inv(a @ a.T + alpha * torch.eye(17, dtype=torch.float64))
    assert torch.allclose(method.projectors["hidden.1"][0], closed, atol=1e-6)
    assert method.tasks == 2


def test_alpha_falls_over_the_task() -> None:
    """P^-1 = I + sum r r^T / alpha_i, with alpha_i = alpha_start alpha_decay^(i/n)."""
    method = make_method(alpha_start=2.0, alpha_decay=0.01)
    batches = make_batches(0)
    consolidate(method, 0, batches)
    wanted = torch.eye(13, dtype=torch.float64)
    for number, (inputs, _) in enumerate(batches):
        r = torch.cat([inputs.double().mean(dim=0), torch.ones(1, dtype=torch.float64)])
        wanted += torch.outer(r, r) / (2.0 * 0.01 ** (number / 3))
    assert torch.allclose(torch.linalg.inv(method.projectors["hidden.0"][0]), wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False),
        nn.Conv2d(3, 4, (2, 3), dilation=2, bias=False),
    ],
    ids=["strided", "dilated"],
)
def test_patches_of_a_convolution_are_those_under_its_kernel(layer: nn.Conv2d) -> None:
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = layer
            self.heads = nn.ModuleList([nn.Linear(4, 3)])

        def forward(self, x: Tensor, head: int) -> Tensor:
            logits: Tensor = self.heads[head](self.conv(x).relu().mean(dim=(2, 3)))
            return logits

    method = make_method(Convolved(), alpha_decay=1.0)
    inputs, labels = torch.randn(4, 3, 9, 8), torch.zeros(4, dtype=torch.long)
    consolidate(method, 0, [(inputs, labels)])
    patches = F.unfold(
        inputs.mean(dim=0, keepdim=True),
        layer.kernel_size,  # type: ignore[arg-type]
        dilation=layer.dilation,
        padding=layer.padding,  # type: ignore[arg-type]
        stride=layer.stride,
    )[0].T.double()
    d = patches.shape[1]
    wanted = shrink_one_by_one(torch.eye(d, dtype=torch.float64), patches, 1.0)
    assert torch.allclose(method.projectors["conv"][0], wanted, atol=1e-9)


@pytest.mark.parametrize("rows", [4, 12])
def test_a_step_is_the_gradient_times_the_projector_in_either_order(rows: int) -> None:
    method = make_method(clip_norm=math.inf)
    learn(method, 0, make_batches(0))
    consolidate(method, 0, make_batches(0))
    net: Any = method.network
    before = {name: value.detach().clone() for name, value in net.named_parameters()}
    inputs, labels = (torch.cat(parts)[:rows] for parts in zip(*make_batches(1), strict=True))
    assert list(method._find_wide(rows=rows)) == (["hidden.0", "hidden.1"] if rows == 4 else [])
    net.zero_grad(set_to_none=True)
    F.cross_entropy(net(inputs, 1), labels).backward()  # type: ignore[no-untyped-call]
    plain = {name: value.grad for name, value in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    method.step((inputs, labels), 1, Moment(0, 0.0, 0.0), torch.optim.SGD(net.parameters(), lr=0.1))
    for layer in ("hidden.0", "hidden.1"):
        joint = torch.cat([plain[f"{layer}.weight"], plain[f"{layer}.bias"].unsqueeze(1)], dim=1)
        projected = (joint.double() @ method.projectors[layer][0]).float()
        after = dict(net.named_parameters())
        weight = after[f"{layer}.weight"] - before[f"{layer}.weight"]
        bias = after[f"{layer}.bias"] - before[f"{layer}.bias"]
        assert torch.allclose(weight, -0.1 * projected[:, :-1], atol=1e-7)
        assert torch.allclose(bias, -0.1 * projected[:, -1], atol=1e-7)
    head = dict(net.named_parameters())["heads.1.weight"]
    assert torch.allclose(head - before["heads.1.weight"], -0.1 * plain["heads.1.weight"], atol=1e-7)


def test_a_weight_that_several_calls_or_layers_use_has_the_gradient_of_all_of_them() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice, self.once, self.tied = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
            self.tied.weight = self.once.weight
            self.heads = nn.ModuleList([nn.Linear(12, 3)])

        def forward(self, x: Tensor, head: int) -> Tensor:
            x = self.twice(self.twice(x).tanh()).tanh()
            logits: Tensor = self.heads[head](self.tied(self.once(x).tanh()))
            return logits

    method = make_method(Tied(), alpha_start=1e9, alpha_decay=1.0, clip_norm=math.inf)  # projectors that change nothing
    consolidate(method, 0, make_batches(0))
    inputs, labels = make_batches(0)[0]
    assert list(method._find_wide(rows=len(labels))) == ["twice"]
    F.cross_entropy(method.network(inputs, 0), labels).backward()  # type: ignore[no-untyped-call]
    plain = {name: p.grad for name, p in method.network.named_parameters()}
    method.step((inputs, labels), 0, Moment(0, 0.0, 0.0), torch.optim.SGD(method.network.parameters(), lr=0.0))
    for name, p in method.network.named_parameters():
        assert torch.allclose(p.grad, plain[name], rtol=1e-4, atol=1e-6), name


def test_a_later_task_hardly_changes_layer_outputs_for_old_mean_inputs() -> None:
    moved = {}
    for alpha in (1e-6, 1e6):  # as good as blocked, and as good as free
        method = make_method(alpha_start=alpha, alpha_decay=1.0)
        learn(method, 0, make_batches(0))
        consolidate(method, 0, make_batches(0))
        net: Any = method.network
        means = torch.stack([inputs.mean(dim=0) for inputs, _ in make_batches(0)])
        before = net.hidden[0](means).detach()
        learn(method, 1, make_batches(1), epochs=5)
        moved[alpha] = float((net.hidden[0](means).detach() - before).norm() / before.norm())
    assert moved[1e-6] < 1e-5
    assert moved[1e6] > 1e-2


def test_the_first_task_is_plain_unless_projectors_follow_each_step() -> None:
    plain = MLP((12, 16, 8), (3, 2))
    later, each = make_method(), make_method(update="step")
    plain.load_state_dict(later.network.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for inputs, labels in make_batches(0):
        optimizer.zero_grad()
        F.cross_entropy(plain(inputs, 0), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for method in (later, each):
        learn(method, 0, make_batches(0))
    own = later.network.state_dict()
    assert all(torch.allclose(value, own[name], atol=1e-7) for name, value in plain.state_dict().items())
    assert later.projectors == {}
    other: Any = each.network
    assert not torch.allclose(plain.hidden[0].weight, other.hidden[0].weight, atol=1e-4)
    assert each.projectors.keys() == {"hidden.0", "hidden.1"}
    kept = {name: projector.clone() for name, projector in each.projectors.items()}
    consolidate(each, 0, make_batches(0))
    assert all(torch.equal(projector, each.projectors[name]) for name, projector in kept.items())


def test_projectors_of_a_step_are_of_the_batch_before_it_is_projected() -> None:
    method = make_method(update="step", alpha_start=1e-9, alpha_decay=1.0, clip_norm=math.inf)
    net: Any = method.network
    (inputs, labels), *_ = make_batches(0)
    before = net.hidden[0](inputs.mean(dim=0)).detach()
    method.step((inputs, labels), 0, Moment(0, 0.0, 0.0), torch.optim.SGD(net.parameters(), lr=0.1))
    assert torch.allclose(net.hidden[0](inputs.mean(dim=0)), before, atol=1e-5)


@pytest.mark.parametrize("update", ["task", "step"])
@pytest.mark.parametrize("network", [LeNet, AlexNet, ResNet18], ids=lambda kind: kind.__name__)
def test_it_works_on_convolutions_and_residual_networks(network: Any, update: str) -> None:
    options = {"statistics": "stored"} if network is not LeNet else {}
    method = make_method(network(IMAGE, (3, 2), **options), update=update)
    for task in (0, 1):
        batches = make_batches(task, IMAGE)[:1]
        norms = {name: p.detach().clone() for name, p in method.network.named_parameters() if "norm" in name}
        learn(method, task, batches, lr=0.01)
        consolidate(method, task, batches)
        own = dict(method.network.named_parameters())
        assert all(torch.equal(value, own[name]) == bool(task) for name, value in norms.items())
        assert all(bool(p.isfinite().all()) for p in own.values())
        assert all(0 <= share < 1 for share in method.measure_free().values())
    assert method.norm_statistics == "per-task"
    wide = {"LeNet": 2 * 3200**2, "AlexNet": 2 * 2048**2, "ResNet18": 2 * 1440**2}[network.__name__]
    assert method.count_bytes() == {"projectors": sum(8 * p.numel() for p in method.projectors.values())}
    assert method.count_bytes()["projectors"] >= 4 * wide


def test_a_shared_head_has_a_projector_and_heads_of_single_tasks_have_none() -> None:
    assert make_method().measure_free() == {"hidden.0": 1, "hidden.1": 1}
    shared = make_method(MLP((12, 16, 8), (3,)), exclude=())
    assert shared.measure_free().keys() == {"hidden.0", "hidden.1", "heads.0"}


def test_groups_have_a_projector_each() -> None:
    method = make_method(nn.Sequential(nn.Conv2d(4, 6, 3, groups=2)), exclude=(), alpha_decay=1.0)
    x = torch.randn(2, 4, 5, 5)
    method.consolidate([(x, torch.zeros(2))], lambda batch: method.network(batch[0]).sum(dim=(1, 2, 3)))
    assert method.projectors["0"].shape == (2, 19, 19)
    second = F.unfold(x[:, 2:].mean(dim=0, keepdim=True), 3)[0].T.double()
    second = torch.cat([second, torch.ones(len(second), 1, dtype=torch.float64)], dim=1)
    wanted = shrink_one_by_one(torch.eye(19, dtype=torch.float64), second, 1.0)
    assert torch.allclose(method.projectors["0"][1], wanted, atol=1e-8)


def test_decays_are_set_by_pattern_and_a_layer_without_one_is_an_error() -> None:
    method = make_method(alpha_decay={"hidden.0": 0.5, "*": 0.1})
    assert method._decays == {"hidden.0": 0.5, "hidden.1": 0.1}
    with pytest.raises(ValueError, match=r"no pattern matches the layer 'hidden.1'"):
        make_method(alpha_decay={"hidden.0": 0.5})
    with pytest.raises(ValueError, match=r"the pattern 'conv1' matches no module"):
        make_method(alpha_decay={"conv1": 0.5, "*": 0.1})


def test_batches_may_be_an_iterator_and_the_networks_mode_is_restored() -> None:
    one, other = make_method(), make_method()
    other.network.train()
    one.consolidate(make_batches(0), lambda batch: one.network(batch[0], 0).sum(dim=1))
    other.consolidate(iter(make_batches(0)), lambda batch: other.network(batch[0], 0).sum(dim=1))
    assert all(torch.equal(value, other.projectors[name]) for name, value in one.projectors.items())
    assert other.network.training
