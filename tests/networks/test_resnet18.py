"""The ResNet-18 of Split miniImageNet is the published one: sizes, strides, shortcuts, BatchNorm's statistics."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sgp.networks.resnet18 import BasicBlock, ResNet18


def test_it_has_the_published_number_of_parameters() -> None:
    model = ResNet18()
    backbone = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("heads."))
    assert backbone == 1093140
    assert sum(p.numel() for p in model.heads.parameters()) == 20 * 5 * 1440
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 20
    assert all(m.bias is None for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear))


def test_layers_have_the_names_that_patterns_use() -> None:
    names = [name for name, module in ResNet18().named_modules() if isinstance(module, nn.Conv2d)]
    assert names[:5] == ["conv1", "layer1.0.conv1", "layer1.0.conv2", "layer1.1.conv1", "layer1.1.conv2"]
    assert [name for name in names if "shortcut" in name] == [f"layer{stage}.0.shortcut.0" for stage in (2, 3, 4)]


@pytest.mark.parametrize(("size", "maps", "features"), [(84, [42, 42, 21, 11, 6], 1440), (32, [32, 32, 16, 8, 4], 640)])
def test_feature_maps_have_the_published_sizes(size: int, maps: list[int], features: int) -> None:
    model, shapes = ResNet18((3, size, size)), []
    for layer in (model.conv1, model.layer1, model.layer2, model.layer3, model.layer4):
        layer.register_forward_hook(lambda m, i, out: shapes.append(tuple(out.shape[1:])))
    images = torch.randn(2, 3, size, size)
    assert model(images, 3).shape == (2, 5)
    assert shapes == [(channels, s, s) for channels, s in zip((20, 20, 40, 80, 160), maps, strict=True)]
    assert model.features(images).shape == (2, features)


@pytest.mark.parametrize(("outputs", "stride"), [(6, 1), (6, 2), (8, 1)])
def test_a_block_is_the_one_written_out(outputs: int, stride: int) -> None:
    torch.manual_seed(0)
    block, x = BasicBlock(6, outputs, stride, stored=False), torch.randn(4, 6, 7, 7)
    untouched = x.clone()
    assert (len(block.shortcut) == 0) is (stride == 1 and outputs == 6)
    out = block.norm2(block.conv2(F.relu(block.norm1(block.conv1(x)))))
    torch.testing.assert_close(block(x), F.relu(out + block.shortcut(x)))
    # Both branches read the input, so nothing may write into it.
    assert torch.equal(x, untouched)
