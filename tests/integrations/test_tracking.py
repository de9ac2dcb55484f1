"""Metrics of a memory for the loggers of trainers."""

import re
from itertools import pairwise

import pytest
import torch
from torch import nn

import sgp
from sgp.integrations.tracking import collect_capacity, collect_changes, collect_update, name_groups


def test_layers_of_one_kind_and_dimension_are_a_group() -> None:
    widths = [4, 8, 8, 6, 6, 2]
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    memory = sgp.GradientMemory(nn.Sequential(*layers), threshold=0.9)
    # Two groups would be called "*", so the dimension follows, which includes the bias.
    assert name_groups(memory) == {"0": "0", "1": "all.9", "2": "all.9", "3": "all.7", "4": "all.7"}


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.LSTM(3, 4, 2, bidirectional=True))])
def test_names_have_only_characters_that_loggers_accept(model: nn.Module) -> None:
    memory = sgp.GradientMemory(model, threshold=0.9)
    groups = name_groups(memory)
    assert groups.keys() == memory.layers.keys()
    assert all(re.fullmatch(r"[\w.]+", group) for group in groups.values())
    assert len(set(groups.values())) == len(groups)


def test_groups_have_the_mean_of_their_layers_and_the_largest_leak() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    memory = sgp.GradientMemory(model, threshold=0.9, alpha=1.0)
    x = torch.randn(20, 2) @ torch.randn(2, 6)
    report = memory.update([x])
    free = [layer.free for layer in memory.capacity().layers]
    captured = [layer.captured for layer in report.layers if layer.captured is not None]
    assert len(captured) == 3
    assert collect_capacity(memory) == {"sgp/free/all": pytest.approx(sum(free) / 3)}
    assert collect_update(memory, report) == {
        "sgp/free/all": pytest.approx(sum(free) / 3),
        "sgp/captured/all": pytest.approx(sum(captured) / 3),
    }
    with torch.no_grad():
        model[1].weight.add_(torch.randn(6, 6))
    checks = [memory.check(batch) for batch in (x[:5], x[5:])]
    figures = collect_changes(memory, [x[:5], x[5:]], forward=None)
    layers = [layer for check in checks for layer in check.layers]
    assert figures["sgp/output_drift"] == pytest.approx((checks[0].drift + checks[1].drift) / 2)
    assert figures["sgp/leak/all"] == max(layer.leak for layer in layers)
    assert figures["sgp/drift/all"] == pytest.approx(sum(layer.drift for layer in layers) / 6)
