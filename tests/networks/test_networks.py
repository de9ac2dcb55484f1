"""Registered networks are built in one way and can be protected by a memory."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sgp
from sgp.networks import NETWORKS
from sgp.registry import UnknownName

SHAPES = [("mlp", (1, 8, 8)), ("alexnet", (3, 32, 32)), ("lenet", (3, 32, 32)), ("resnet18", (3, 32, 32))]


def test_our_networks_are_registered_with_a_description() -> None:
    assert {name for name, _ in SHAPES} <= set(NETWORKS)
    for name, _ in SHAPES:
        assert NETWORKS[name].name == name
        assert NETWORKS[name].description


@pytest.mark.parametrize(("name", "inputs"), [*SHAPES, ("resnet18", (3, 84, 84))])
def test_every_network_gives_the_logits_of_one_head(name: str, inputs: tuple[int, ...]) -> None:
    x = torch.randn(4, *inputs)
    model = NETWORKS[name].build(inputs, (2, 7)).eval()
    assert [model(x, task).shape for task in (0, 1)] == [(4, 2), (4, 7)]
    shared = NETWORKS[name].build(inputs, (3,)).eval()
    torch.testing.assert_close(shared(x, 5), shared(x, 0))


@pytest.mark.parametrize("name", ["alexnet", "lenet", "resnet18"])
def test_an_unsupported_shape_raises_an_error_with_the_networks_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"takes inputs of shape \(3, .*got \(1, 28, 28\)"):
        NETWORKS[name].build((1, 28, 28), (10,))


@pytest.mark.parametrize(("name", "inputs"), SHAPES)
def test_options_are_those_that_are_named(name: str, inputs: tuple[int, ...]) -> None:
    values = {"statistics": "stored", "bias": False}
    options = {option: values[option] for option in NETWORKS[name].options}
    model = NETWORKS[name].build(inputs, (3,), **options)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert bool(norms) is ("statistics" in options)
    assert all(norm.track_running_stats for norm in norms)
    assert not any(module.bias is not None for module in model.modules() if isinstance(module, nn.Linear))
    with pytest.raises(TypeError, match="depth"):
        NETWORKS[name].build(inputs, (3,), depth=4)


@pytest.mark.parametrize("name", ["alexnet", "resnet18"])
@pytest.mark.parametrize("statistics", ["batch", "stored"])
def test_with_batch_statistics_only_an_image_depends_on_the_rest_of_the_batch(name: str, statistics: str) -> None:
    torch.manual_seed(0)
    images = torch.randn(8, 3, 32, 32)
    model = NETWORKS[name].build((3, 32, 32), (10,), statistics=statistics).eval()
    alone, together = model(images[:4], 0), model(images, 0)[:4]
    assert torch.allclose(alone, together, atol=1e-5) is (statistics == "stored")
    assert bool(list(model.buffers())) is (statistics == "stored")


def test_an_unknown_name_is_reported_with_the_nearest_names() -> None:
    with pytest.raises(UnknownName, match="alexnet"):
        NETWORKS["alexnt"]


# Features of random weights and noise have nearly one direction.
@pytest.mark.filterwarnings("ignore:one direction has nearly all")
@pytest.mark.parametrize(("name", "inputs"), SHAPES)
def test_a_memory_protects_every_layer(name: str, inputs: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, labels = torch.randn(8, *inputs), torch.randint(0, 3, (8,))
    model = NETWORKS[name].build(inputs, (3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    memory = sgp.GradientMemory(model, threshold=0.9, alpha=10, exclude=["heads.*"])
    memory.attach(optimizer)

    def step(task: int) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(x, task), labels))
        optimizer.step()

    step(0)
    memory.update([x])
    layers = {k: m for k, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and "heads" not in k}
    assert memory.subspaces.keys() == layers.keys()
    before = {k: _matrix(layer) for k, layer in layers.items()}
    step(1)
    for key, layer in layers.items():
        change = _matrix(layer) - before[key]
        strongest = memory.subspaces[key].basis[0][:, 0]
        assert float((change @ strongest).norm()) < 1e-4 * float(change.norm()) + 1e-7


def _matrix(layer: nn.Module) -> Tensor:
    """Return a copy of a layer's weight [outputs, inputs], with its bias as one more column."""
    assert isinstance(layer, nn.Conv2d | nn.Linear)
    columns = [layer.weight.detach().flatten(1)]
    if layer.bias is not None:
        columns.append(layer.bias.detach().unsqueeze(1))
    return torch.cat(columns, dim=1)
