"""The diagonal Fisher information equals that of single examples' gradients, for all layer types."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgp.methods import Batch
from sgp.methods.fisher import compute_batch_fisher, compute_sample_fisher, preserve_state, use_drawn_labels
from sgp.networks import MLP, LeNet, ResNet18

N = 5


class Residual(nn.Module):
    """A residual block with norm layers in which examples do not interact."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False)
        self.last = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.first(x)))
        x = self.relu(x + self.last(self.second(x)))
        out: Tensor = self.head(x.mean(dim=(2, 3)))
        return out


class Twice(nn.Module):
    """A layer used twice, weights that are tied or used outside their module, and one of an unsupported layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.tied, self.same = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.same.weight = self.tied.weight
        self.loose = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(5))
        self.unused = nn.Linear(5, 2)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.layer(x).tanh()).tanh()
        x = self.same(self.tied(x).tanh()).tanh() * self.scale
        x = self.loose(x).tanh() + F.linear(x, self.loose.weight)
        out: Tensor = self.head(x)
        return out


class Attention(nn.Module):
    """Sequences: linear layers and norms at several positions, and a layer whose weights are not in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.rms = nn.RMSNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        out: Tensor = self.head(self.rms(x).mean(dim=1))
        return out


class Keys(nn.Module):
    """Attention in its parts. The bias of the keys adds the same to all that is compared: it has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        out: Tensor = self.head(x.mean(dim=1))
        return out


class Texts(nn.Module):
    """Embeddings: words, some repeated in an example or padding, and positions that are looked up once."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 8, padding_idx=0)
        self.kinds = nn.Embedding(2, 8)
        self.positions = nn.Embedding(9, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        words = (3 * x.abs()).long().clamp(max=5)
        x = self.words(words) + self.kinds(words % 2) + self.positions(torch.arange(words.shape[1]).unsqueeze(0))
        out: Tensor = self.head(self.norm(x).tanh().mean(dim=1))
        return out


def make_convolution(**options: Any) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, **options), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 3)
    )


IMAGES, VECTORS = (3, 7, 7), (5,)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: MLP((5, 7, 6), (3,)), VECTORS),
    "no bias": (lambda: MLP((5, 7), (3,), bias=False), VECTORS),
    "plain": (make_convolution, (4, 7, 7)),
    "strided": (lambda: make_convolution(stride=2), (4, 7, 7)),
    "padded": (lambda: make_convolution(padding=1, stride=(2, 1)), (4, 7, 7)),
    "same": (lambda: make_convolution(padding="same", bias=False), (4, 7, 7)),
    "reflected": (lambda: make_convolution(padding=2, padding_mode="reflect"), (4, 7, 7)),
    "dilated": (lambda: make_convolution(dilation=2), (4, 7, 7)),
    "grouped": (lambda: make_convolution(groups=2, stride=2, padding=1), (4, 7, 7)),
    "one dimension": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3, stride=2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)),
        (2, 8),
    ),
    "residual": (Residual, IMAGES),
    "twice": (Twice, VECTORS),
    "sequences": (Attention, (3, 4)),
    "texts": (Texts, (7,)),
    "keys": (Keys, (6, 4)),
    "lenet": (lambda: LeNet(heads=(3,)), (3, 32, 32)),
    "resnet": (lambda: ResNet18((3, 32, 32), (3,), statistics="stored"), (3, 32, 32)),
}


def make_method(case: str) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    network, shape = CASES[case][0](), CASES[case][1]
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.normal_(module.weight, mean=1, std=0.1)
    return network.eval(), (torch.randn(N, *shape), torch.arange(N) % 3)


def make_log_likelihood(network: nn.Module) -> Callable[[Batch], Tensor]:
    return lambda batch: -F.cross_entropy(network(batch[0]), batch[1], reduction="none")


def compute_with_func(network: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Compute the mean of the squared gradients of single examples by torch.func.

    LeNet's response norm has a backward pass of its own, which torch.func does not take; its examples run alone.
    """
    if isinstance(network, LeNet):
        names, weights = zip(*network.named_parameters(), strict=True)
        alone = [
            torch.autograd.grad(F.cross_entropy(network(x.unsqueeze(0)), y.unsqueeze(0)), weights)
            for x, y in zip(*batch, strict=True)
        ]
        return {
            name: torch.stack(each).square().mean(dim=0)
            for name, each in zip(names, zip(*alone, strict=True), strict=True)
        }
    parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}

    def value(parameters: dict[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
        logits = torch.func.functional_call(network, parameters, (x.unsqueeze(0),))
        return -F.cross_entropy(logits, label.unsqueeze(0))

    gradients = [torch.func.grad(value)(parameters, x, label) for x, label in zip(*batch, strict=True)]
    return {name: torch.stack([each[name] for each in gradients]).square().mean(dim=0) for name in parameters}


@pytest.mark.parametrize("case", CASES)
def test_fisher_information_is_the_mean_square_of_each_examples_gradient(case: str) -> None:
    network, (inputs, labels) = make_method(case)
    batches = list(zip(inputs.split(3), labels.split(3), strict=True))
    expected = compute_with_func(network, (inputs, labels))
    fisher = compute_sample_fisher(network, dict(network.named_parameters()), batches, make_log_likelihood(network))
    assert fisher.keys() == expected.keys()
    nothing = 1e-10 * max(float(value.max()) for value in expected.values())  # rounding, squared
    for name, value in expected.items():
        torch.testing.assert_close(fisher[name], value, rtol=1e-3, atol=1e-5 * float(value.max()) + nothing, msg=name)
    used = {name for name, value in expected.items() if value.any()}
    assert used == {name for name in expected if not name.startswith("unused")}


@pytest.mark.parametrize(
    ("case", "passes"), [("residual", 1), ("lenet", 1), ("texts", 1), ("keys", 1), ("twice", 1 + N)]
)
def test_known_layers_take_one_backward_pass_for_a_batch(
    case: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, batch = make_method(case)
    counted, grad = [], torch.autograd.grad

    def counting(*args: Any, **kwargs: Any) -> Any:
        counted.append(1)
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counting)
    compute_sample_fisher(network, dict(network.named_parameters()), [batch], make_log_likelihood(network))
    assert len(counted) == passes


def test_chunks_of_examples_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    network, batch = make_method("grouped")
    parameters = dict(network.named_parameters())
    whole = compute_sample_fisher(network, parameters, [batch], make_log_likelihood(network))
    monkeypatch.setattr("sgp.methods.fisher.FLOATS_PER_CHUNK", 1)
    for name, value in compute_sample_fisher(network, parameters, [batch], make_log_likelihood(network)).items():
        torch.testing.assert_close(value, whole[name])


def test_the_published_form_squares_the_gradient_of_a_batch_and_is_smaller() -> None:
    network, _ = make_method("linear")
    inputs, labels = torch.randn(50, 5), torch.randint(3, (50,))
    batches = list(zip(inputs.split(20), labels.split(20), strict=True))
    parameters = dict(network.named_parameters())
    fisher = compute_batch_fisher(parameters, batches, make_log_likelihood(network))
    expected = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for x, y in batches:
        network.zero_grad()
        F.cross_entropy(network(x), y).backward()
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            expected[name] += 20 * parameter.grad.square() / 50
    for name, value in expected.items():
        torch.testing.assert_close(fisher[name], value)
    single = compute_sample_fisher(network, parameters, batches, make_log_likelihood(network))
    ratio = sum(float(v.sum()) for v in single.values()) / sum(float(v.sum()) for v in fisher.values())
    assert ratio > 4


def test_drawn_labels_follow_the_networks_own_output() -> None:
    torch.manual_seed(0)
    network = nn.Linear(2, 3)
    inputs = torch.randn(1, 2)
    shares = network(inputs).detach().softmax(dim=1).squeeze(0)
    batch = (inputs.expand(6000, 2), torch.zeros(6000, dtype=torch.long))
    values = use_drawn_labels(network, make_log_likelihood(network))(batch).detach()
    for share in shares:
        assert float((values - share.log()).abs().lt(1e-4).float().mean()) == pytest.approx(float(share), abs=0.03)
    # The definition: sum over labels y of p(y) (d log p(y) / d theta)^2.
    expected = torch.zeros_like(network.weight)
    for label, share in enumerate(shares.tolist()):
        (gradient,) = torch.autograd.grad(network(inputs).log_softmax(dim=1)[0, label], network.weight)
        expected += share * gradient.square()
    found = compute_sample_fisher(
        network, {"weight": network.weight}, [batch], use_drawn_labels(network, make_log_likelihood(network))
    )
    torch.testing.assert_close(found["weight"], expected, rtol=0.1, atol=0)


def test_labels_are_drawn_only_from_logits() -> None:
    network = nn.Conv2d(3, 3, 1)
    with pytest.raises(TypeError, match=r"logits \[n, classes\]; the network's output is \(2, 3, 4, 4\)"):
        use_drawn_labels(network, lambda batch: network(batch[0]))((torch.zeros(2, 3, 4, 4), torch.zeros(2)))


def test_modes_and_running_statistics_are_restored() -> None:
    network = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())
    network[1].eval()
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    with preserve_state(network, training=True):
        assert network[1].training
        network(torch.randn(8, 3) + 5)
        assert not torch.equal(before["0.running_mean"], network[0].running_mean)  # type: ignore[arg-type]
    assert (network[0].training, network[1].training) == (True, False)
    for name, buffer in network.named_buffers():
        assert torch.equal(buffer, before[name])


def test_nothing_is_left_on_the_network() -> None:
    network, batch = make_method("residual")
    compute_sample_fisher(network, dict(network.named_parameters()), [batch], make_log_likelihood(network))
    assert all(parameter.grad is None for parameter in network.parameters())
    assert not any(module._forward_hooks for module in network.modules())


@pytest.mark.parametrize("case", ["linear", "twice"])
def test_the_result_is_the_same_under_no_grad(case: str) -> None:
    network, batch = make_method(case)
    parameters = dict(network.named_parameters())
    for find in (partial(compute_sample_fisher, network), compute_batch_fisher):
        expected = find(parameters, [batch], make_log_likelihood(network))
        with torch.no_grad():
            found = find(parameters, [batch], make_log_likelihood(network))
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert any(value.any() for value in found.values())


def test_a_log_likelihood_of_a_wrong_shape_or_without_graph_is_an_error() -> None:
    network, batch = make_method("linear")
    parameters = dict(network.named_parameters())
    for find in (partial(compute_sample_fisher, network), compute_batch_fisher):
        with pytest.raises(ValueError, match=r"a number for each of 5 examples, got \(\)"):
            find(parameters, [batch], lambda batch: make_log_likelihood(network)(batch).mean())
        with pytest.raises(ValueError, match="log_likelihood has no gradient"):
            find(parameters, [batch], lambda batch: make_log_likelihood(network)(batch).detach())
        assert find({}, [batch], lambda batch: make_log_likelihood(network)(batch).detach()) == {}


def test_no_examples_are_an_error() -> None:
    network, _ = make_method("linear")
    parameters = dict(network.named_parameters())
    with pytest.raises(ValueError, match="no examples"):
        compute_sample_fisher(network, parameters, [], make_log_likelihood(network))
    with pytest.raises(ValueError, match="no examples"):
        compute_batch_fisher(parameters, [], make_log_likelihood(network))
