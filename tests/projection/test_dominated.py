"""A warning of layers in which a few inputs have nearly all of the energy."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import sgp


def make_rows(size_of_first: float) -> Tensor:
    """Return rows [200, 64] of many directions; the first one has a size of its own."""
    rows = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    rows[0] *= size_of_first
    return rows


def test_one_direction_with_nearly_all_of_the_energy_is_reported() -> None:
    layer = nn.Linear(64, 2)
    memory = sgp.GradientMemory(layer, threshold=0.95)
    with pytest.warns(
        UserWarning, match=r"one direction has nearly all .* \(model\) \((99|100)\.\d%\).*higher threshold"
    ):
        report = memory.update([make_rows(1e3)])
    assert report.layers[0].bases == 1
    assert report.layers[0].leading > 0.99


@pytest.mark.parametrize(("size", "threshold"), [(1.0, 0.95), (1e2, 0.999)])
def test_layers_with_enough_bases_are_not_reported(size: float, threshold: float) -> None:
    memory = sgp.GradientMemory(nn.Linear(64, 2), threshold=threshold)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="nearly all of the capacity")
        report = memory.update([make_rows(size)])
    assert report.layers[0].bases > 1
    assert report.layers[0].leading < 1
