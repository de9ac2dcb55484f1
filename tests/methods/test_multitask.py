"""Multitask: all tasks at once, in random turns, each through its own head."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

pytest.importorskip("yaml", reason="the settings come from YAML files; of the extra 'benchmarks'")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra 'benchmarks'")

from experiments.small import events, of_kind, run, same_weights, small, stream_of, trace

from sgp.benchmarks.stream import Stream, Task
from sgp.experiments.config import Config
from sgp.experiments.evaluation import evaluate
from sgp.experiments.folder import RunFolder
from sgp.experiments.summary import read_summary
from sgp.methods import METHODS, Batch, Method, Moment
from sgp.methods.method import NoSettings
from sgp.methods.multitask import Multitask
from sgp.networks import MLP

Step = tuple[int, Tensor, Moment]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Record head, inputs and moment of every training step of a run."""
    taken: list[Step] = []

    def step(self: Multitask, batch: Batch, head: int, moment: Moment, optimizer: Optimizer) -> float:
        taken.append((head, batch[0], moment))
        return Method.step(self, batch, head, moment, optimizer)

    monkeypatch.setattr(Multitask, "step", step)
    return taken


def list_rows(inputs: Tensor) -> list[tuple[float, ...]]:
    return sorted(map(tuple, inputs.tolist()))


def split_epochs(steps: list[Step]) -> Iterator[list[Step]]:
    for epoch in range(steps[-1][2].epoch + 1):
        yield [step for step in steps if step[2].epoch == epoch]


def test_an_epoch_has_every_example_of_every_task_once_and_each_batch_is_of_one(
    steps: list[Step], tmp_path: Path
) -> None:
    config = small("multitask")
    run(tmp_path, config)
    stream = stream_of(config)
    assert len(list(split_epochs(steps))) == config.trainer.epochs
    for epoch in split_epochs(steps):
        for position in range(len(stream)):
            seen = torch.cat([inputs for head, inputs, _ in epoch if head == position])
            assert list_rows(seen) == list_rows(stream[position].train.inputs)


def test_tasks_take_random_turns_that_depend_on_epoch_and_seed(steps: list[Step], tmp_path: Path) -> None:
    def list_turns(name: str, seed: int) -> list[list[int]]:
        steps.clear()
        run(tmp_path / name, small("multitask", seed=seed))
        return [[head for head, _, _ in epoch] for epoch in split_epochs(steps)]

    first, second = list_turns("one", 0)
    assert sorted(first) == sorted(second)
    assert set(first) == {0, 1, 2}
    assert first != second
    # Two if tasks came one after another.
    changes = sum(one != other for one, other in pairwise(first))
    assert changes > 8
    assert list_turns("two", 0) == [first, second]
    assert list_turns("other", 1)[0] != first


def test_the_schedule_goes_over_all_tasks(steps: list[Step], tmp_path: Path) -> None:
    run(tmp_path, small("multitask"))
    moments = [moment for _, _, moment in steps]
    shares = [moment.share_of_task for moment in moments]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert 0.9 < shares[-1] < 1
    assert [moment.epoch for moment in moments] == sorted(moment.epoch for moment in moments)


def test_a_batch_goes_through_the_head_of_its_task() -> None:
    torch.manual_seed(0)
    network = MLP((6, 5), (2, 3))
    method = Multitask(network, NoSettings())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    method.attach(optimizer)
    before = {name: weight.clone() for name, weight in network.state_dict().items()}
    method.step((torch.randn(4, 6), torch.tensor([0, 1, 2, 2])), 1, Moment(0, 0.0, 0.0), optimizer)
    moved = {name for name, weight in network.state_dict().items() if not torch.equal(weight, before[name])}
    assert moved == {"hidden.0.weight", "hidden.0.bias", "heads.1.weight", "heads.1.bias"}


def make_unequal_stream(config: Config) -> Stream:
    """Return split digits whose first task has most of the validation examples."""
    stream = stream_of(config)

    def make(position: int) -> Task:
        task = stream[position]
        return task if position == 0 else replace(task, validation=task.validation[: 2 * position])

    return replace(stream, make=make)


def test_validation_is_the_mean_over_tasks_however_many_examples_each_has(tmp_path: Path) -> None:
    config = small("multitask", epochs=1)
    stream = make_unequal_stream(config)
    learner = run(tmp_path, config, stream=stream)
    (epoch,) = of_kind(events(tmp_path), "epoch")
    scores = []
    for position in range(3):
        task = stream[position]
        order = torch.arange(len(task.validation))
        scores.append(evaluate(learner.network, task.validation, task.head, batch=256, order=order))
    assert len({len(stream[position].validation) for position in range(3)}) == 3
    losses = [score.loss for score in scores if score.loss is not None]
    accuracies = [score.accuracy for score in scores if score.accuracy is not None]
    assert epoch["validation_loss"] == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert epoch["validation_accuracy"] == pytest.approx(sum(accuracies) / 3)


@pytest.mark.parametrize("kind", ["split", "permuted"])
def test_the_matrix_of_a_run_has_one_accuracy_for_each_task(kind: str, tmp_path: Path) -> None:
    """Tasks that were learned at once have a row each, as if nothing had been learned after them."""
    config = small("multitask", kind=kind)
    learner = run(tmp_path, config)
    found = events(tmp_path)
    assert [entry["event"] for entry in found] == ["epoch"] * 2 + ["task"] * 3 + ["end"]
    last = learner.accuracies[-1]
    assert learner.accuracies == [last[:1], last[:2], last]
    assert [entry["accuracies"] for entry in of_kind(found, "task")] == [last[:1], last[:2], last]
    assert [entry["name"] for entry in of_kind(found, "task")] == list(learner.stream.names)
    assert found[-1] == {"event": "end", "acc": pytest.approx(sum(last) / 3), "bwt": 0}
    summary = read_summary(RunFolder(tmp_path))
    assert summary.finished
    assert torch.equal(summary.accuracies, torch.tensor(last, dtype=torch.float64).expand(3, 3).tril())
    for position, accuracy in enumerate(last):
        task = learner.load_task(position)
        score = evaluate(learner.network, task.test, task.head, batch=256, order=torch.arange(len(task.test)))
        assert score.accuracy == accuracy


class Stop(BaseException):
    """Ends a run at any point, as a signal does."""


def stop_at(number: int) -> Any:
    """Return a callback that ends the run at its n-th event."""
    seen = 0

    def watch(event: str, values: dict[str, Any]) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            raise Stop

    return watch


@pytest.mark.parametrize(
    "recipe",
    [{}, {"schedule": "patience", "patience": 1, "lr": 1.0, "lr_min": 0.3}, {"schedule": "cosine", "average": 0.9}],
    ids=["constant", "patience", "fast"],
)
def test_a_run_that_was_stopped_at_any_event_ends_with_the_same_bits(recipe: dict[str, Any], tmp_path: Path) -> None:
    config = small("multitask", samples=60, **recipe)
    whole = run(tmp_path / "whole", config)
    for number in range(1, len(events(tmp_path / "whole")) + 1):
        path = tmp_path / f"stopped at {number}"
        with pytest.raises(Stop):
            run(path, config, stop_at(number))
        resumed = run(path, config, resume=True)
        assert same_weights(whole.network, resumed.network)
        assert trace(path) == trace(tmp_path / "whole")


def test_it_is_better_on_old_tasks_than_finetuning(tmp_path: Path) -> None:
    accuracies = {}
    for method in ("finetune", "multitask"):
        learner = run(tmp_path / method, small(method, kind="permuted", tasks=4, epochs=3))
        accuracies[method] = sum(learner.accuracies[-1]) / 4
    assert accuracies["multitask"] > accuracies["finetune"] + 5


def test_it_stores_nothing_beside_the_network_and_has_all_data() -> None:
    method = Multitask(MLP((6, 5), (2,)), NoSettings())
    assert (method.state_dict(), method.count_bytes(), method.measure_free()) == ({}, {}, {})
    assert method.compute_capacity() == 100
    assert METHODS["multitask"] is Multitask
    assert Multitask.keeps_data
