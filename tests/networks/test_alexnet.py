"""The AlexNet of Split CIFAR-100 is the published one: sizes, order of parameters, what follows each layer."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgp.networks.alexnet import AlexNet
from sgp.networks.dropout import FastDropout


def test_it_has_the_published_number_of_parameters() -> None:
    model = AlexNet()
    weights = {name: getattr(model, name).weight.numel() for name in ("conv1", "conv2", "conv3", "fc1", "fc2")}
    assert weights == {"conv1": 3072, "conv2": 73728, "conv3": 131072, "fc1": 2097152, "fc2": 4194304}
    assert sum(p.numel() for name, p in model.named_parameters() if name.startswith("norm")) == 9088
    assert sum(p.numel() for p in model.heads.parameters()) == 204800
    assert sum(p.numel() for p in model.parameters()) == 6713216


def test_protected_weights_stand_where_the_published_code_expects_them() -> None:
    names = [name for name, _ in AlexNet().named_parameters()]
    assert [names[i] for i in (0, 3, 6, 9, 12)] == [f"{m}.weight" for m in ("conv1", "conv2", "conv3", "fc1", "fc2")]
    assert all(name.startswith("heads.") for name in names[15:])


def test_no_layer_has_a_bias() -> None:
    layers = [m for m in AlexNet().modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == 15
    assert all(layer.bias is None for layer in layers)


def test_feature_maps_have_the_published_sizes() -> None:
    model, shapes = AlexNet(), {}
    for name in ("conv1", "conv2", "conv3", "fc1", "fc2"):
        layer = getattr(model, name)
        layer.register_forward_hook(lambda m, i, out, name=name: shapes.update({name: tuple(out.shape[1:])}))
    model(torch.randn(2, 3, 32, 32), task=0)
    assert shapes == {
        "conv1": (64, 29, 29),
        "conv2": (128, 12, 12),
        "conv3": (256, 5, 5),
        "fc1": (2048,),
        "fc2": (2048,),
    }


def published_order(model: AlexNet, x: Tensor) -> Tensor:
    """Features of the published network: after each layer BatchNorm, ReLU and dropout, and then the pooling."""
    light, heavy = FastDropout(0.2).train(model.training), FastDropout(0.5).train(model.training)
    x = F.max_pool2d(light(F.relu(model.norm1(model.conv1(x)))), 2)
    x = F.max_pool2d(light(F.relu(model.norm2(model.conv2(x)))), 2)
    x = F.max_pool2d(heavy(F.relu(model.norm3(model.conv3(x)))), 2)
    x = heavy(F.relu(model.norm4(model.fc1(x.flatten(1)))))
    return heavy(F.relu(model.norm5(model.fc2(x))))


@pytest.mark.parametrize("training", [True, False])
def test_what_follows_a_layer_comes_in_the_published_order(training: bool) -> None:
    torch.manual_seed(0)
    model = AlexNet().train(training)
    images = torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last)
    torch.manual_seed(1)
    expected = published_order(model, images)
    torch.manual_seed(1)
    torch.testing.assert_close(model.features(images), expected)
    # All features must count, since a wrong backward pass through the network would show only in gradients.
    gradients = []
    for features in (model.features, lambda x: published_order(model, x)):
        torch.manual_seed(1)
        gradients.append(torch.autograd.grad(features(images).square().sum(), list(model.parameters())[:15]))
    for got, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-3, atol=1e-4 * float(reference.abs().max()))


def test_the_memory_format_does_not_matter() -> None:
    model, images = AlexNet().eval(), torch.randn(4, 3, 32, 32)
    expected = model(images)
    torch.testing.assert_close(model(images.to(memory_format=torch.channels_last)), expected)
    torch.testing.assert_close(model.to(memory_format=torch.channels_last)(images), expected, rtol=1e-4, atol=1e-5)
