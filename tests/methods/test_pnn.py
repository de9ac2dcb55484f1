"""PNN: columns compute its formula, have the sizes that are set, and stay as they are once learned."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sgp.methods import Batch, Moment
from sgp.methods.pnn import PNN, LateralLayer, PNNSettings
from sgp.networks import MLP, AlexNet, LeNet, ResNet18

IMAGE = (3, 32, 32)
CLASSES = (3, 2, 4)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP((12, 16, 8), CLASSES),
    "lenet": lambda: LeNet(heads=CLASSES),
    "alexnet": lambda: AlexNet(heads=CLASSES),
    "alexnet-stored": lambda: AlexNet(heads=CLASSES, statistics="stored"),
    "resnet18": lambda: ResNet18(IMAGE, CLASSES),
    "resnet18-stored": lambda: ResNet18(IMAGE, CLASSES, statistics="stored"),
}


def make_method(network: nn.Module, *, exclude: tuple[str, ...] = ("heads.*",), **settings: Any) -> PNN:
    return PNN(network, PNNSettings(**settings), exclude=exclude)


def make_small(kind: str = "mlp", **settings: Any) -> PNN:
    torch.manual_seed(0)
    return make_method(NETWORKS[kind](), **({"column_width": 0.2} | settings))


def get_shape(kind: str) -> tuple[int, ...]:
    return (12,) if kind == "mlp" else IMAGE


def make_batch(task: int, shape: tuple[int, ...] = (12,), classes: int | None = None) -> Batch:
    generator = torch.Generator().manual_seed(task)
    return torch.randn(6, *shape, generator=generator), torch.arange(6) % (classes or CLASSES[task])


def learn(method: PNN, head: int, batch: Batch, *, steps: int = 2, lr: float = 0.01) -> None:
    """Train on a task as the trainer does."""
    torch.manual_seed(head)
    method.begin_task(head, [batch])
    optimizer = method.build_optimizer(torch.optim.SGD, lr)
    method.attach(optimizer)
    method.network.train()
    for _ in range(steps):
        method.step(batch, head, Moment(0, 0.0, 0.0), optimizer)
    method.consolidate([batch], lambda batch: batch[0])


@torch.no_grad()
def get_logits(method: PNN, head: int, inputs: Tensor) -> Tensor:
    method.network.eval()
    return method.compute_logits(inputs, head)


@pytest.mark.parametrize("kind", NETWORKS)
def test_outputs_for_old_tasks_stay_equal_to_the_bit(kind: str) -> None:
    method, shape = make_small(kind), get_shape(kind)
    inputs, known = make_batch(0, shape)[0], []
    for task in range(3):
        learn(method, task, make_batch(task, shape))
        known.append(get_logits(method, task, inputs))
        for old, before in enumerate(known):
            assert torch.equal(get_logits(method, old, inputs), before)
    assert all(each.isfinite().all() and each.abs().max() > 1e-3 for each in known)


@pytest.mark.parametrize("kind", ["mlp", "lenet"])
def test_a_column_computes_the_formula(kind: str) -> None:
    method, shape = make_small(kind), get_shape(kind)
    for task in range(3):
        learn(method, task, make_batch(task, shape))
    inputs, _ = make_batch(0, shape)
    order = [size.name for size in method._sizes[0]][:-1]
    met: list[dict[int, Tensor]] = []
    for task, column in enumerate(method.columns):
        network, x, own = method.network, inputs, {}
        for place, name in enumerate([*order, f"heads.{task}"]):
            layer = column.get_submodule(name)
            assert isinstance(layer, LateralLayer)
            own[place] = x
            out = layer.layer(x)
            if place and task:
                # [n, columns, channels, pixels]
                earlier = torch.stack([a * each[place] for a, each in zip(layer.scales, met, strict=True)], dim=1)
                earlier = earlier.reshape(len(x), task, layer.channels, -1)
                v = layer.reduction.weight.view(layer.channels, task, layer.channels)
                reduced = torch.einsum("ojc,njcp->nop", v, earlier)
                assert layer.lateral is not None
                assert layer.lateral.bias is None
                out = out + layer.lateral(reduced.relu().reshape(x.shape))
            x = out
            if name.startswith("conv"):
                x = network.pool(network.norm(x.relu()))  # type: ignore[operator, union-attr]
            elif not name.startswith("heads"):
                x = x.relu()
            if name == "conv2":
                x = x.flatten(start_dim=1)
        met.append(own)
        torch.testing.assert_close(get_logits(method, task, inputs), x)


def test_only_the_newest_column_has_gradients_and_all_of_it_has() -> None:
    method = make_small("lenet")
    for task in range(2):
        learn(method, task, make_batch(task, IMAGE))
    assert all(each.grad is None and not each.requires_grad for each in method.columns[0].parameters())
    for name, each in method.columns[1].named_parameters():
        assert each.grad is not None, name
        assert each.grad.any(), name


def test_a_column_reads_every_earlier_one() -> None:
    method = make_small()
    for task in range(3):
        learn(method, task, make_batch(task))
    inputs, _ = make_batch(0)
    before = [get_logits(method, task, inputs) for task in range(3)]
    with torch.no_grad():
        for parameter in method.columns[1].parameters():
            parameter.mul_(1.5)
    changed = [not torch.equal(get_logits(method, task, inputs), before[task]) for task in range(3)]
    assert changed == [False, True, True]


def test_earlier_columns_are_in_eval_mode_while_a_later_one_is_trained() -> None:
    method = make_small("alexnet-stored")
    for task in range(2):
        learn(method, task, make_batch(task, IMAGE))
    assert not any(module.training for module in method.columns[0].modules())
    assert all(module.training for module in method.columns[1].modules())
    get_logits(method, 1, make_batch(0, IMAGE)[0])
    assert not any(module.training for module in method.columns[1].modules())


def test_a_column_has_the_width_that_is_set_and_its_own_head() -> None:
    method = make_small("lenet", column_width=0.17)
    learn(method, 0, make_batch(0, IMAGE))
    learn(method, 2, make_batch(2, IMAGE))
    shapes = {name: tuple(each.shape) for name, each in method.columns[1].named_parameters() if "layer." in name}
    assert shapes == {
        "conv1.layer.weight": (3, 3, 5, 5),
        "conv2.layer.weight": (8, 3, 5, 5),
        "fc1.layer.weight": (136, 8 * 64),
        "fc2.layer.weight": (85, 136),
        "heads.2.layer.weight": (4, 85),
    }
    reductions = [each.reduction.weight.shape for each in method.columns[1].modules() if hasattr(each, "reduction")]
    assert reductions == [(3, 3), (8, 8), (136, 136), (85, 85)]


def test_capacity_counts_all_columns_against_the_network_with_all_its_heads() -> None:
    torch.manual_seed(0)
    method = make_method(MLP((12, 16, 8), (3, 2)), column_width=0.5)
    network = 12 * 16 + 16 + 16 * 8 + 8 + 8 * 5 + 5
    learn(method, 0, make_batch(0))
    first = 12 * 8 + 8 + 8 * 4 + 4 + 4 * 3 + 3
    assert method.compute_capacity() == pytest.approx(100 * first / network)
    learn(method, 1, make_batch(1))
    own = 12 * 8 + 8 + 8 * 4 + 4 + 4 * 2 + 2
    lateral = (8 * 4 + 8 * 8 + 1) + (4 * 2 + 4 * 4 + 1)
    assert method.compute_capacity() == pytest.approx(100 * (first + own + lateral) / network)
    assert method.count_bytes() == {"columns": 4 * (first + own + lateral)}


def test_the_smallest_width_leaves_one_unit() -> None:
    method = make_small(column_width=1e-9)
    learn(method, 0, make_batch(0))
    assert [size.units for size in method._sizes[0]] == [1, 1, 3]


def test_tasks_that_share_a_head_have_a_copy_each() -> None:
    torch.manual_seed(0)
    method = make_method(MLP((12, 16), (3,)), exclude=())
    for task in range(2):
        learn(method, task, make_batch(task, classes=3))
    heads = [column.get_submodule("heads.0.layer") for column in method.columns]
    assert heads[0].weight.shape == heads[1].weight.shape == (3, 16)
    inputs, _ = make_batch(0)
    assert not torch.equal(get_logits(method, 0, inputs), get_logits(method, 1, inputs))


def test_weights_start_as_those_of_the_network_do() -> None:
    torch.manual_seed(0)
    method = make_method(LeNet(heads=CLASSES), column_width=0.5)
    for task in range(2):
        method.begin_task(task, [make_batch(task, IMAGE)])
    for size in method._sizes[1][1:-1]:
        wide = method.network.get_submodule(size.name).weight.flatten(start_dim=1)  # type: ignore[union-attr, operator]
        layer = method.columns[1].get_submodule(size.name)
        for part in (layer.layer, layer.lateral):
            narrow = part.weight.flatten(start_dim=1)  # type: ignore[union-attr, operator]
            # Of both, the sum of squares over the inputs of a unit is the same on average.
            ratio = narrow.detach().square().sum(dim=1).mean() / wide.detach().square().sum(dim=1).mean()  # type: ignore[operator]
            assert abs(ratio - 1) < 0.1, size.name
        assert not torch.equal(layer.layer.weight, layer.lateral.weight)  # type: ignore[union-attr, arg-type]
    scales = [each.scales for each in method.columns[1].modules() if hasattr(each, "scales")]
    assert 0.01 < torch.cat(scales).std() < 0.5  # type: ignore[arg-type]


def test_the_given_network_is_never_trained() -> None:
    method = make_small("resnet18-stored")
    before = copy.deepcopy(method.network.state_dict())
    for task in range(2):
        learn(method, task, make_batch(task, IMAGE))
    assert all(torch.equal(value, before[name]) for name, value in method.network.state_dict().items())


@pytest.mark.parametrize("kind", ["lenet", "resnet18-stored"])
def test_columns_are_built_again_from_a_state(kind: str) -> None:
    method, shape = make_small(kind), get_shape(kind)
    method.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for task in range(2):
        learn(method, task, make_batch(task, shape))
    other = make_small(kind)
    other.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    other.load_state_dict(method.state_dict())
    other.trained_module.load_state_dict(method.trained_module.state_dict())
    inputs, _ = make_batch(0, shape)
    for task in range(2):
        assert torch.equal(get_logits(other, task, inputs), get_logits(method, task, inputs))
    for one, two in zip(method.columns.parameters(), other.columns.parameters(), strict=True):
        assert one.stride() == two.stride()


def test_nothing_of_a_pass_is_stored_after_it() -> None:
    method = make_small()
    learn(method, 0, make_batch(0))
    assert not method._seen


class Odd(nn.Module):
    """An unsupported network."""

    def __init__(self, *layers: nn.Module, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.again = again

    def forward(self, x: Tensor, task: int = 0) -> Tensor:
        x = self.layers(x)
        return self.layers(x) if self.again else x


@pytest.mark.parametrize(
    ("network", "shape", "words"),
    [
        (Odd(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1, groups=2), nn.Flatten()), (4, 2, 2), "'layers.1' has 2 groups"),
        (Odd(nn.Linear(4, 4), again=True), (4,), "'layers.0' runs more than once"),
        (Odd(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), (4,), "'layers.1' is of type LayerNorm"),
    ],
)
def test_unsupported_networks_raise_errors(network: nn.Module, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        make_method(network, exclude=()).begin_task(0, [make_batch(0, shape)])
