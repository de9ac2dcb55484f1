"""The setting of a run that projects the change of several steps at once."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra 'benchmarks'")
pytest.importorskip("yaml", reason="the settings of runs are YAML files; of the extra 'benchmarks'")

from experiments.small import events, of_kind, run, small, stream_of

from sgp.experiments.config import configure
from sgp.experiments.folder import RunFolder
from sgp.experiments.supervised import SupervisedTrainer

# No divisor of the steps of an epoch, so that the count carries over from one epoch to the next.
EVERY = 5


def test_it_changes_the_run_and_keeps_blocked_directions(tmp_path: Path) -> None:
    weights = {}
    for every in (1, EVERY):
        config = small("gpm", project_every=every, optimizer="adamw", lr=1e-3, tasks=2)
        learner = run(tmp_path / str(every), config)
        weights[every] = learner.network.hidden[0].weight.detach().clone()  # type: ignore[union-attr, index]
        first, last = of_kind(events(tmp_path / str(every)), "task")
        assert last["accuracies"][0] == pytest.approx(first["accuracies"][0], abs=5)
    assert not torch.equal(weights[1], weights[EVERY])


def test_weights_are_evaluated_projected(tmp_path: Path) -> None:
    """At the end of an epoch nothing is left to project, wherever the count is."""
    pending: list[bool] = []

    def watch(event: str, values: object) -> None:
        if event == "epoch":
            layers = learner.method.memory.layers.values()  # type: ignore[attr-defined]
            pending.extend(parameter.pending is not None for layer in layers for parameter in layer.parameters)

    config = small("sgp", project_every=10**6, optimizer="adamw", lr=1e-3, tasks=2)
    with RunFolder.begin(tmp_path, config, resume=False) as folder:
        learner = SupervisedTrainer(config, stream_of(config), folder, watch)
        learner.run()
    assert len(pending) >= 4
    assert not any(pending)


def test_an_impossible_number_and_averaged_weights_raise_errors() -> None:
    with pytest.raises(ValueError, match="project_every must be at least 1, got 0"):
        configure("digits", "sgp", project_every=0)
    with pytest.raises(ValueError, match="project_every goes with average=0"):
        configure("digits", "sgp", project_every=2, average=0.9, schedule="cosine")
