"""The LeNet of CIFAR-100 Superclass is the published one: sizes, initialisation, what follows each layer."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from sgp.networks.lenet import LeNet


def test_it_has_the_published_number_of_parameters() -> None:
    model = LeNet()
    weights = {name: getattr(model, name).weight.numel() for name in ("conv1", "conv2", "fc1", "fc2")}
    assert weights == {"conv1": 1500, "conv2": 25000, "fc1": 2560000, "fc2": 400000}
    assert sum(p.numel() for p in model.parameters()) == 3036500


def test_protected_weights_stand_where_the_published_code_expects_them() -> None:
    names = [name for name, _ in LeNet().named_parameters()]
    assert names[:4] == ["conv1.weight", "conv2.weight", "fc1.weight", "fc2.weight"]
    assert names[4:] == [f"heads.{task}.weight" for task in range(20)]


def test_all_weights_start_uniform_with_the_bound_for_relu() -> None:
    torch.manual_seed(0)
    for parameter in LeNet(heads=(200, 200)).parameters():
        weight = parameter.detach()
        bound = math.sqrt(6 / weight[0].numel())
        assert 0.99 * bound < float(weight.abs().max()) <= bound
        # A uniform distribution has the deviation bound/sqrt(3).
        assert math.isclose(float(weight.std()), bound / math.sqrt(3), rel_tol=0.05)


def test_features_are_those_of_the_published_order() -> None:
    torch.manual_seed(0)
    model, images = LeNet(), torch.rand(4, 3, 32, 32)
    # So large that the normalisation changes something.
    images *= 100
    norm = nn.LocalResponseNorm(4, alpha=0.001 / 9, beta=0.75, k=1)
    x = F.max_pool2d(norm(F.relu(model.conv1(images))), 3, stride=2, padding=1)
    assert x.shape == (4, 20, 16, 16)
    x = F.max_pool2d(norm(F.relu(model.conv2(x))), 3, stride=2, padding=1)
    assert x.shape == (4, 50, 8, 8)
    expected = F.relu(model.fc2(F.relu(model.fc1(x.flatten(1)))))
    torch.testing.assert_close(model.features(images), expected, rtol=1e-4, atol=1e-4)
    without = F.relu(model.conv1(images))
    assert not torch.allclose(norm(without), without, rtol=1e-2)


def test_training_and_eval_mode_are_the_same() -> None:
    model, images = LeNet(), torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(model.train()(images, 3), model.eval()(images, 3))
