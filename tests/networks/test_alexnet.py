"""The AlexNet of Split CIFAR-100 is the published one: sizes, order of parameters, BatchNorm's statistics."""

import pytest
import torch
from torch import nn

from sgp.networks.alexnet import AlexNet


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


def test_it_gives_the_logits_of_one_task_or_of_all() -> None:
    model = AlexNet(tasks=3, classes=7).eval()
    images = torch.randn(5, 3, 32, 32)
    every = model(images)
    assert [logits.shape for logits in every] == [(5, 7)] * 3
    torch.testing.assert_close(model(images, task=1), every[1])


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


def test_with_batch_statistics_an_image_depends_on_its_neighbours() -> None:
    torch.manual_seed(0)
    images = torch.randn(8, 3, 32, 32)
    networks = {True: AlexNet(tasks=1, statistics="batch"), False: AlexNet(tasks=1, statistics="stored")}
    for depends, model in networks.items():
        model.eval()
        alone, together = model(images[:4], task=0), model(images, task=0)[:4]
        assert torch.allclose(alone, together, atol=1e-5) is not depends


def test_only_stored_statistics_leave_buffers() -> None:
    assert not list(AlexNet(statistics="batch").buffers())
    assert len(list(AlexNet(statistics="stored").buffers())) == 15


def test_an_unknown_kind_of_statistics_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'running'"):
        AlexNet(statistics="running")  # type: ignore[arg-type]
