"""The perceptron: widths as asked, ReLU between layers and none after the head."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import nn

from sgp.networks.mlp import MLP


def test_default_is_the_network_of_the_demo() -> None:
    shapes = [tuple(p.shape) for p in MLP().parameters() if p.ndim == 2]
    assert shapes == [(100, 64), (100, 100), (10, 100)]


def test_weights_start_as_those_of_layers_made_in_order() -> None:
    torch.manual_seed(0)
    expected = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise((64, 100, 100, 10))]
    torch.manual_seed(0)
    model = MLP()
    for layer, reference in zip([*model.hidden, *model.heads], expected, strict=True):
        assert torch.equal(layer.weight, reference.weight)
        assert torch.equal(layer.bias, reference.bias)


def test_widths_heads_and_bias_are_parameters() -> None:
    layers = [m for m in MLP((7, 5, 4), heads=(3, 2), bias=False).modules() if isinstance(m, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == [(7, 5), (5, 4), (4, 3), (4, 2)]
    assert all(layer.bias is None for layer in layers)


def test_logits_are_those_written_out() -> None:
    model = MLP((6, 5), heads=(3, 2))
    x = torch.randn(4, 6)
    hidden = (x @ model.hidden[0].weight.T + model.hidden[0].bias).clamp(min=0)
    for task, head in enumerate(model.heads):
        torch.testing.assert_close(model(x, task), hidden @ head.weight.T + head.bias)


def test_images_are_flattened() -> None:
    model, images = MLP(), torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(model(images), model(images.reshape(3, 64)))


def test_without_hidden_layers_it_is_linear() -> None:
    assert [name for name, _ in MLP((4,), heads=(2,)).named_parameters()] == ["heads.0.weight", "heads.0.bias"]


@pytest.mark.parametrize("widths", [(), (64, 0)])
def test_invalid_widths_raise_an_error(widths: Sequence[int]) -> None:
    with pytest.raises(ValueError, match="widths"):
        MLP(widths)
