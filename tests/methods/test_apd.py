"""APD: steps minimize its objective, old weights stay where they were, and common parts are stored once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

pytest.importorskip("yaml", reason="the settings come from YAML files; of the extra 'benchmarks'")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra 'benchmarks'")


from sgp.methods import Batch, Moment
from sgp.methods.apd import APD, APDSettings, Decomposed, cluster
from sgp.networks import MLP, ResNet18

START = Moment(0, 0.0, 0.0)
CLASSES = (3, 2, 4)


def make_method(network: nn.Module | None = None, *, exclude: tuple[str, ...] = ("heads.*",), **settings: Any) -> APD:
    torch.manual_seed(0)
    return APD(network or MLP((12, 16, 8), CLASSES), APDSettings(**settings), exclude=exclude)


def make_batch(task: int, shape: tuple[int, ...] = (12,)) -> Batch:
    generator = torch.Generator().manual_seed(task)
    return torch.randn(6, *shape, generator=generator), torch.arange(6) % CLASSES[task]


def learn(method: APD, head: int, batch: Batch, *, steps: int = 5, lr: float = 0.1) -> None:
    """Train on a task as the trainer does."""
    torch.manual_seed(head)
    method.begin_task(head, [batch])
    optimizer = method.build_optimizer(SGD, lr)
    method.network.train()
    for _ in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr
        method.step(batch, head, START, optimizer)
    method.consolidate([batch], lambda batch: batch[0])


@torch.no_grad()
def get_logits(method: APD, head: int, inputs: Tensor) -> Tensor:
    method.network.eval()
    return method.compute_logits(inputs, head)


def compute_objective(method: APD, batch: Batch, head: int) -> Tensor:
    """Compute the objective as in the paper, with every old tau at its best for the current sigma."""
    l1, decay, approx = method.settings.l1, method.settings.weight_decay, method.settings.approx
    total = method.compute_loss(batch, head, START)
    for weight, mask, tau in zip(method.weights.values(), method._masks, method._tau, strict=True):
        total = total + decay / 2 * (tau.square().sum() + mask.square().sum())
        if method.settings.penalty == "subgradient":
            total = total + l1 * tau.abs().sum()
        if not method.heads:
            total = total + decay / 2 * weight.sigma.square().sum()
        for task in range(len(method.heads)):
            old = weight.compute_tau(task, l1 / approx)
            theta = weight.masks[task].sigmoid()[:, None] * weight.sigma + old
            total = total + approx / 2 * (theta - weight.targets[task]).square().sum() + l1 * old.abs().sum()
    return total


@pytest.mark.parametrize("penalty", ["proximal", "subgradient"])
@pytest.mark.parametrize("tau_start", ["zero", "shared"])
@pytest.mark.parametrize("tasks", [0, 2])
def test_a_step_descends_the_objective(tasks: int, tau_start: str, penalty: str) -> None:
    method = make_method(weight_decay=0.1, l1=0.01, penalty=penalty, tau_start=tau_start, approx=1.0)
    for task in range(tasks):
        learn(method, task, make_batch(task))
    batch = make_batch(2)
    method.begin_task(2, [batch])
    with torch.no_grad():
        for weight in method.weights.values():  # away from where the old tasks left it
            weight.sigma.add_(0.02 * torch.randn_like(weight.sigma))
    trained = [each for each in method.trained_module.parameters() if each.requires_grad]
    gradients = torch.autograd.grad(compute_objective(method, batch, 2), trained, allow_unused=True)
    before = [each.detach().clone() for each in trained]
    method.step(batch, 2, START, method.build_optimizer(SGD, 0.1))
    shrunk = {id(tau) for tau in method._tau} if penalty == "proximal" else set()
    for now, was, gradient in zip(trained, before, gradients, strict=True):
        expected = was if gradient is None else was - 0.1 * gradient
        if id(now) in shrunk:
            expected = expected.sign() * (expected.abs() - 0.1 * 0.01).clamp(min=0)
        torch.testing.assert_close(now.detach(), expected, atol=1e-6, rtol=1e-5)


def test_an_old_tau_is_the_best_for_its_sigma() -> None:
    torch.manual_seed(0)
    weight, l1, approx = Decomposed(nn.Parameter(torch.randn(4, 5))), 0.3, 2.0
    weight.add_task(torch.randn(4), 0.5 * torch.randn(4, 5))
    with torch.no_grad():
        weight.sigma.add_(torch.randn(4, 5))
    tau = weight.compute_tau(0, l1 / approx)

    def compute_cost(tau: Tensor) -> Tensor:
        theta = weight.masks[0].sigmoid()[:, None] * weight.sigma.detach() + tau
        return approx / 2 * (theta - weight.targets[0]).square() + l1 * tau.abs()

    assert 0 < tau.count_nonzero() < tau.numel()
    for shift in (1e-2, -1e-2, 0.3, -0.3):
        assert (compute_cost(tau + shift) > compute_cost(tau)).all()
    assert (compute_cost(torch.zeros_like(tau)) >= compute_cost(tau) - 1e-6).all()


def test_old_weights_stay_within_l1_of_what_they_were_whatever_becomes_of_sigma() -> None:
    method = make_method(l1=0.01, approx=10)
    learn(method, 0, make_batch(0))
    was = {name: method._compute_theta(weight, 0).detach().clone() for name, weight in method.weights.items()}
    with torch.no_grad():
        for weight in method.weights.values():
            weight.sigma.add_(torch.randn_like(weight.sigma))
    for name, weight in method.weights.items():
        assert (method._compute_theta(weight, 0) - weight.targets[0]).abs().max() <= 0.01 + 1e-6
        assert (method._compute_theta(weight, 0) - was[name]).abs().max() <= 0.02 + 1e-6


def test_proximal_steps_give_zeros_and_subgradients_do_not() -> None:
    counts = {}
    for penalty in ("proximal", "subgradient"):
        method = make_method(penalty=penalty, l1=0.05)
        learn(method, 0, make_batch(0), steps=10)
        counts[penalty] = [(tau == 0).float().mean() for tau in method._tau]
    # Those of units that ReLU keeps shut have no gradient at all.
    assert all(one > other + 0.2 for one, other in zip(counts["proximal"], counts["subgradient"], strict=True))
    assert all(share < 1 for share in counts["proximal"])


def test_a_task_keeps_its_biases_its_head_and_its_statistics() -> None:
    torch.manual_seed(0)
    method = make_method(ResNet18((3, 32, 32), CLASSES, statistics="stored"), l1=0.0)
    inputs, _ = make_batch(0, (3, 32, 32))
    learn(method, 0, make_batch(0, (3, 32, 32)), steps=2, lr=0.01)
    before = get_logits(method, 0, inputs)
    learn(method, 1, make_batch(1, (3, 32, 32)), steps=2, lr=0.01)
    # With l1 = 0 nothing keeps tau from making up for all that sigma does.
    torch.testing.assert_close(get_logits(method, 0, inputs), before, atol=1e-3, rtol=1e-3)
    assert not torch.equal(method._kept[0]["norm1.running_mean"], method._kept[1]["norm1.running_mean"])
    assert not torch.equal(method._kept[0]["norm1.bias"], method._kept[1]["norm1.bias"])


def test_a_head_that_all_share_is_decomposed_like_the_rest() -> None:
    method = make_method(MLP((12, 16), (3,)), exclude=(), tau_start="shared", mask_start=0.0)
    assert list(method.weights) == ["hidden.0.weight", "heads.0.weight"]
    learn(method, 0, make_batch(0))
    learn(method, 1, make_batch(1))
    inputs, _ = make_batch(0)
    assert not torch.equal(get_logits(method, 0, inputs), get_logits(method, 1, inputs))


def test_inference_takes_small_elements_of_tau_for_zero() -> None:
    method = make_method(l1=0.01)
    method.begin_task(0, [make_batch(0)])
    with torch.no_grad():
        method._tau[0].fill_(0.01)
        method._tau[0][0] = 0.011
    theta = method._get_tensors(0)["hidden.0.weight"]
    weight = method.weights["hidden.0.weight"]
    shared = method._masks[0].sigmoid()[:, None] * weight.sigma
    assert torch.equal(theta[1:], shared[1:])
    torch.testing.assert_close(theta[0], shared[0] + 0.011)


def test_capacity_counts_what_is_not_zero() -> None:
    method = make_method(l1=0.01, group_every=0)
    total = 12 * 16 + 16 + 16 * 8 + 8 + (8 + 1) * sum(CLASSES)
    shared, own = 12 * 16 + 16 * 8, 16 + 8
    method.begin_task(0, [make_batch(0)])
    method.step(make_batch(0), 0, START, method.build_optimizer(SGD, 1e-9))
    with torch.no_grad():
        method._tau[0].zero_()[0, :5] = 1.0
    method.consolidate([], lambda batch: batch[0])
    # sigma, five elements of tau, a number of the mask and a bias for each unit, and the head.
    assert method.compute_capacity() == pytest.approx(100 * (shared + 5 + own + own + 9 * 3) / total)


def test_kmeans_finds_obvious_groups() -> None:
    torch.manual_seed(0)
    centres = 10 * torch.randn(3, 50)
    kinds = torch.tensor([0, 1, 2, 0, 1, 0, 2])
    labels = cluster(centres[kinds] + 0.1 * torch.randn(7, 50), 3)
    assert len(set(labels)) == 3
    assert all((labels[i] == labels[j]) == bool(kinds[i] == kinds[j]) for i in range(7) for j in range(7))
    assert sorted(cluster(centres, 3)) == [0, 1, 2]
    assert cluster(torch.zeros(2, 5), 2) == [0, 0]


def test_common_parts_of_a_group_are_stored_once() -> None:
    weight = Decomposed(nn.Parameter(torch.zeros(1, 3)))
    for tau in ([0.500, 0.2, 0.0], [0.508, 0.1, 0.0], [-5.0, 5.0, 9.0]):
        weight.add_task(torch.zeros(1), torch.tensor([tau]))
    weight.form_groups(2, gap=0.01, l1=1e-3)
    group, alone = weight.groups[0], weight.groups[2]
    assert weight.groups == [group, group, alone]
    assert group != alone
    torch.testing.assert_close(weight.common[group], torch.tensor([[0.504, 0.0, 0.0]]))
    assert not weight.common[alone].any()
    expected = torch.tensor([[[0.0, 0.2, 0.0]], [[0.0, 0.1, 0.0]], [[-5.0, 5.0, 9.0]]])
    torch.testing.assert_close(weight.targets, expected)
    # The next time groups are formed again from whole tau, which includes the old common part.
    weight.add_task(torch.zeros(1), torch.tensor([[-5.0, 5.0, 9.0]]))
    weight.form_groups(2, gap=0.01, l1=1e-3)
    assert weight.groups[0] == weight.groups[1] != weight.groups[2] == weight.groups[3]
    torch.testing.assert_close(weight.common[weight.groups[2]], torch.tensor([[-5.0, 5.0, 9.0]]))
    whole = weight.targets + weight.common[weight.groups]
    torch.testing.assert_close(whole[:2, 0], torch.tensor([[0.504, 0.2, 0.0], [0.504, 0.1, 0.0]]))


def test_groups_are_formed_every_so_many_tasks_and_outputs_contain_their_parts() -> None:
    method = make_method(group_every=2, group_centroids=1, tau_start="shared", l1=1e-4)
    learn(method, 0, make_batch(0))
    assert all(weight.groups == [-1] for weight in method.weights.values())
    learn(method, 1, make_batch(1))
    for name, weight in method.weights.items():
        assert weight.groups == [0, 0]
        assert weight.common.any()
        for task in range(2):
            whole = weight.targets[task] + weight.common[0]
            torch.testing.assert_close(method._get_tensors(task)[name], whole, atol=2e-4, rtol=0)


def test_the_learning_rate_decays_by_epoch() -> None:
    method = make_method(lr_decay=0.5)
    method.begin_task(0, [make_batch(0)])
    optimizer = method.build_optimizer(SGD, 0.4)
    method.step(make_batch(0), 0, Moment(2, 0.0, 0.0), optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_proximal_steps_require_sgd() -> None:
    with pytest.raises(ValueError, match="penalty=proximal requires optimizer=sgd"):
        make_method().build_optimizer(Adam, 0.1)


def test_training_reduces_the_loss() -> None:
    method, batch = make_method(), make_batch(1)
    learn(method, 0, make_batch(0))
    before = float(F.cross_entropy(get_logits(method, 0, make_batch(0)[0]), make_batch(0)[1]))
    learn(method, 1, batch, steps=100)
    assert float(F.cross_entropy(get_logits(method, 1, batch[0]), batch[1])) < 0.3
    assert float(F.cross_entropy(get_logits(method, 0, make_batch(0)[0]), make_batch(0)[1])) < before + 0.05
