"""Logged descriptions of a layer's bases: few numbers, correct, and equal after a resume."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra 'benchmarks'")
pytest.importorskip("yaml", reason="the settings of runs are YAML files; of the extra 'benchmarks'")

from experiments.small import events, of_kind, run, small

from sgp.methods.gpm import GPM, POINTS, sample_curve


@pytest.mark.parametrize("method", ["gpm", "sgp"])
def test_logged_bases_are_those_of_the_memory(tmp_path: Path, method: str) -> None:
    learner = run(tmp_path, small(method))
    last = of_kind(events(tmp_path), "task")[-1]
    assert isinstance(learner.method, GPM)
    layers = learner.method.memory.capacity().layers
    assert list(last["bases"]) == [layer.layer for layer in layers]
    for layer in layers:
        values = last["bases"][layer.layer]
        assert (values["count"], values["of"], values["blocked"]) == (layer.bases, layer.dimension, layer.blocked)
        assert len(json.dumps(values)) < 700
        assert ("importances" in values) == (method == "sgp")
        if method == "sgp":
            importance = learner.method.memory.subspaces[layer.layer].importance.flatten().sort(descending=True).values
            assert [position for position, _ in values["importances"]][:: len(values["importances"]) - 1] == [
                1,
                layer.bases,
            ]
            for position, value in values["importances"]:
                assert value == pytest.approx(float(importance[position - 1]), rel=1e-3)


def test_singular_values_of_the_first_task_are_those_of_its_inputs(tmp_path: Path) -> None:
    learner = run(tmp_path, small("gpm", tasks=1, memory_samples=40))
    (first,) = of_kind(events(tmp_path), "task")
    values = first["bases"]["hidden.0"]["singular values"]
    task = learner.load_task(0)
    batch = next(iter(learner._iterate_batches(task, 40, "consolidate", 0)))[0]
    rows = torch.cat([batch, torch.ones(len(batch), 1)], dim=1).double()
    sigma = torch.linalg.svdvals(rows)
    for position, value in values:
        assert value == pytest.approx(float(sigma[position - 1] / sigma[0]), rel=1e-3)
    assert values[0] == [1, 1.0]


def test_sizes_of_tasks_are_logged(tmp_path: Path) -> None:
    learner = run(tmp_path, small("finetune"))
    for position, values in enumerate(of_kind(events(tmp_path), "task")):
        task = learner.load_task(position)
        sizes = {"train": len(task.train), "validation": len(task.validation), "test": len(task.test)}
        assert values["data"] == {"inputs": [64], "classes": learner.stream.heads[position]} | sizes
        assert values["bases"] == {}


def test_a_curve_has_its_ends_and_at_most_the_set_number_of_points() -> None:
    values = torch.rand(1000)
    found = sample_curve(values, torch.linspace(1, 1000, POINTS))
    assert len(found) == POINTS
    assert found[0] == (1, pytest.approx(float(values.max()), rel=1e-3))
    assert found[-1] == (1000, pytest.approx(float(values.min()), rel=1e-3))
    assert sample_curve(torch.rand(2), torch.linspace(1, 2, POINTS))[-1][0] == 2
    assert sample_curve(torch.rand(0), torch.linspace(1, 0, POINTS)) == []
