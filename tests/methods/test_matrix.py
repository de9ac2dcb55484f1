"""Every registered method on every small benchmark.

The runs are small: each method must work everywhere, resume to the bit and store no more than it reports. What a method
achieves is tested in its own file.
"""

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("yaml", reason="the settings come from YAML files; of the extra 'benchmarks'")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra 'benchmarks'")

from experiments.small import events, of_kind, run, run_with_stops, small, stream_of, trace

from sgp.benchmarks import BENCHMARKS, Benchmark
from sgp.benchmarks.stream import Examples, Stream, Task
from sgp.experiments.config import Config, configure
from sgp.experiments.folder import RunFolder
from sgp.experiments.supervised import SupervisedTrainer
from sgp.methods import METHODS
from sgp.methods.adapters import Adapters

IMAGE = (3, 32, 32)


@dataclass(frozen=True)
class Noise:
    """Images of noise, brighter by class."""

    tasks: int = 2
    """Number of tasks."""


def make_noise_stream(heads: list[int], shape: tuple[int, ...], each: int = 6) -> Stream:
    """Return a task for each head, with `each` examples of each class, brighter by class."""

    def part(index: int, use: int) -> Examples:
        generator = torch.Generator().manual_seed(10 * index + use)
        labels = torch.arange(each * heads[index]) % heads[index]
        noise = torch.randn(len(labels), *shape, generator=generator)
        return Examples(noise + labels.view(-1, *[1] * len(shape)), labels)

    def make(index: int) -> Task:
        return Task(names[index], index, part(index, 0), part(index, 1), part(index, 2))

    names = [f"noise {index}" for index in range(len(heads))]
    return Stream(names, shape, heads, make)


NOISE = Benchmark(
    name="noise",
    description="Images of noise.",
    settings=Noise,
    stream=lambda settings, data, seed: make_noise_stream([2] * settings.tasks, IMAGE),  # type: ignore[attr-defined]
    network="lenet",
    datasets=(),
)


@pytest.fixture(scope="module", autouse=True)
def _register_noise() -> Iterator[None]:
    """Register a benchmark for this module, without settings of the paper: methods use their defaults."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BENCHMARKS._known, "noise", NOISE)
        yield


# Two tasks each; together they cover every way to train: the best weights, the last ones, averaged ones.
TINY: dict[str, Any] = {"tasks": 2, "epochs": 2, "threads": torch.get_num_threads()}
IMAGES: dict[str, Any] = TINY | {"benchmark": "noise", "batch": 8, "lr": 0.001}
CASES: dict[str, dict[str, Any]] = {
    "split": TINY | {"benchmark": "digits", "kind": "split", "schedule": "patience", "patience": 1, "epochs": 4},
    "permuted": TINY | {"benchmark": "digits", "kind": "permuted", "epochs": 3},
    "lenet": IMAGES | {"network": "lenet", "schedule": "cosine", "average": 0.9},
    "resnet18": IMAGES | {"network": "resnet18", "schedule": "constant"},
}
# Accuracy in percent on the first task right after it, with two classes and with ten.
LEARNED = {"split": 85, "permuted": 50}
# Networks that a method does not support, with the error that it raises before training.
REFUSED = {("osf", "resnet18"): "osf adapts layers of type Linear, and ResNet18 has none"}


@dataclass(frozen=True)
class Outcome:
    """Outcome of one run.

    Attributes:
        learner: Trainer that ran.
        stopped: Copies of the folder in the middle of tasks, right before a checkpoint was written: what a run that is
            killed there leaves behind.
        sizes: Bytes of the tensors in the method's state, and bytes that it reports, at every event.
        images: Whether the method's state contains images, at every event.
    """

    learner: SupervisedTrainer
    stopped: list[Path]
    sizes: list[tuple[int, int]]
    images: list[bool]


def list_tensors(state: object) -> Iterator[Tensor]:
    """Iterate over all tensors in a state."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from list_tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from list_tensors(value)


def run_observed(path: Path, config: Config, stream: Stream | None = None) -> Outcome:
    """Run a config and inspect the method at every event."""
    stopped: list[Path] = []
    sizes: list[tuple[int, int]] = []
    images: list[bool] = []

    def look(event: str, values: dict[str, Any]) -> None:
        state = list(list_tensors(learner.method.state_dict()))
        sizes.append((sum(tensor.nbytes for tensor in state), sum(learner.method.count_bytes().values())))
        images.append(any(tensor.shape[1:] == IMAGE for tensor in state))
        if event == "epoch" and values["epoch"] == 2:
            stopped.append(path.with_name(f"{path.name}-stopped-{len(stopped)}"))
            shutil.copytree(path, stopped[-1])

    with RunFolder.begin(path, config, resume=False) as folder:
        learner = SupervisedTrainer(config, stream or stream_of(config), folder, look)
        learner.run()
    return Outcome(learner, stopped, sizes, images)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (method, case), id=f"{method}-{case}", marks=[pytest.mark.exhaustive] if case == "resnet18" else []
        )
        for method in METHODS
        for case in CASES
        if (method, case) not in REFUSED
    ],
)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Run a method in a case once, for all tests that inspect it."""
    method, case = request.param
    settings = dict(CASES[case])
    config = configure(settings.pop("benchmark"), method, **settings)
    return run_observed(tmp_path_factory.mktemp("matrix") / case, config)


def list_numbers(value: object) -> Iterator[float]:
    """Iterate over all numbers in an event."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from list_numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from list_numbers(item)
    elif isinstance(value, int | float):
        yield value


def check_events(outcome: Outcome) -> None:
    """Check that every task is logged with the right number of accuracies, and that every number is finite."""
    found, tasks = events(outcome.learner.folder.path), len(outcome.learner.stream)
    assert all(math.isfinite(number) for number in list_numbers(found))
    logged = of_kind(found, "task")
    assert [len(task["accuracies"]) for task in logged] == list(range(1, tasks + 1))
    assert all(0 <= accuracy <= 100 for task in logged for accuracy in task["accuracies"])
    assert all(0 <= free <= 1 for task in logged for free in task["free"].values())
    assert all(count >= 0 for task in logged for count in task["bytes"].values())
    assert all(task["capacity"] > 0 for task in logged)
    assert found[-1]["event"] == "end"


def check_bytes(outcome: Outcome) -> None:
    """Check that the state is no larger than reported, up to a few numbers such as counters."""
    for stored, reported in outcome.sizes:
        assert stored <= max(1.01 * reported, reported + 2**16)


def test_the_first_task_is_learned_and_every_number_is_finite(outcome: Outcome, request: pytest.FixtureRequest) -> None:
    check_events(outcome)
    _, case = request.node.callspec.params["outcome"]
    # Adapters are small beside pretrained weights; three epochs cannot make up for random ones.
    if not isinstance(outcome.learner.method, Adapters):
        assert outcome.learner.accuracies[0][0] >= LEARNED.get(case, 0)


def test_a_run_that_was_killed_inside_a_task_ends_with_the_same_bits(outcome: Outcome) -> None:
    assert len(outcome.stopped) == (1 if outcome.learner.method.trains_jointly else 2)
    whole = trace(outcome.learner.folder.path)
    # Large networks only in the last task, to save time.
    for path in outcome.stopped if outcome.learner.config.benchmark == "digits" else outcome.stopped[-1:]:
        assert len(events(path)) < len(whole["events"])
        run(path, outcome.learner.config, resume=True)
        assert trace(path) == whole


# Settings under which a method has other state than under its usual ones.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("a-gem", {"memory_size": 30, "fill": "every-epoch"}),
    ("apd", {"preset": "reference", "group_every": 2}),
    ("den", {"loss_limit": 0.0, "split_limit": 0.0, "split_units": 2}),
    ("der", {"memory_size": 30, "beta": 0.2}),
    ("er", {"memory_size": 30, "fill": "every-epoch"}),
    ("ewc", {"preset": "reference", "strength": 50.0}),
    ("ewc", {"kind": "permuted", "fisher_labels": "drawn", "merge": "online"}),
    ("fs-dgpm", {"momentum": 0.9, "clip": 2.0, "second_order": True}),
    ("hat", {"test_masks": "hard"}),
    ("owm", {"update": "step"}),
    ("owm", {"kind": "permuted", "update": "step"}),
    ("sgp", {"project_every": 5, "optimizer": "adamw", "lr": 1e-3}),
    ("stl", {"schedule": "cosine", "average": 0.9}),
    ("trgp", {"preset": "reference", "trust_threshold": 0.1}),
]


@pytest.mark.parametrize(("method", "settings"), VARIANTS, ids=str)
def test_a_run_with_other_settings_that_was_stopped_ends_with_the_same_bits(
    method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    config = small(method, **settings)
    run(tmp_path / "whole", config)
    run_with_stops(tmp_path / "stopped", config, (0, 2), (1, 1), (2, 2))
    assert trace(tmp_path / "stopped") == trace(tmp_path / "whole")


def test_the_state_is_no_larger_than_the_counted_bytes(outcome: Outcome) -> None:
    check_bytes(outcome)


def test_only_methods_that_keep_data_store_examples(outcome: Outcome, request: pytest.FixtureRequest) -> None:
    method, case = request.node.callspec.params["outcome"]
    if case not in ("lenet", "resnet18"):  # digits have no shape by which examples can be told from weights
        assert "data" not in outcome.learner.method.count_bytes() or METHODS[method].keeps_data
        return
    # A method that learns all tasks at once gets their data from the trainer.
    assert any(outcome.images) == (METHODS[method].keeps_data and not METHODS[method].trains_jointly)


@pytest.mark.parametrize(("method", "case"), REFUSED)
def test_a_network_that_a_method_cannot_work_on_raises_an_error_before_training(
    method: str, case: str, tmp_path: Path
) -> None:
    settings = dict(CASES[case])
    config = configure(settings.pop("benchmark"), method, **settings)
    with pytest.raises(ValueError, match=REFUSED[method, case]):
        run_observed(tmp_path / case, config)


ODD: dict[str, list[int]] = {
    "one task only": [3],
    "one class first": [1, 3],
    "one class last": [3, 1],
    "one class alone": [1],
    "different class counts": [2, 5, 3],
}


@pytest.mark.parametrize(
    "heads",
    [
        # Between them these two have a task of one class, a stream of one task and different counts of classes.
        pytest.param(
            heads, id=name, marks=[] if name in ("one class alone", "one class first") else [pytest.mark.exhaustive]
        )
        for name, heads in ODD.items()
    ],
)
@pytest.mark.parametrize("method", list(METHODS))
def test_odd_streams_are_learned(method: str, heads: list[int], tmp_path: Path) -> None:
    config = configure("noise", method, network="mlp", epochs=2, batch=8, lr=0.05, threads=torch.get_num_threads())
    outcome = run_observed(tmp_path / "run", config, make_noise_stream(heads, (16,)))
    check_events(outcome)
    check_bytes(outcome)
    for task, classes in enumerate(heads):
        if classes == 1:  # there is no other class
            assert outcome.learner.accuracies[-1][task] == 100
