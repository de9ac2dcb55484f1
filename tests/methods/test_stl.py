"""STL: a network of its own for each task."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("yaml", reason="the settings come from YAML files; of the extra 'benchmarks'")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn, of the extra 'benchmarks'")

from experiments.small import events, of_kind, run, same_weights, small, stream_of

from sgp.experiments.networks import build_network
from sgp.methods import METHODS, Moment
from sgp.methods.method import NoSettings
from sgp.methods.stl import STL
from sgp.networks import MLP, LeNet, ResNet18


def copy_weights(network: nn.Module) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in network.state_dict().items()}


def train(method: STL, head: int, shape: tuple[int, ...] = (6,), classes: int = 2) -> None:
    """Take a few steps on noise."""
    torch.manual_seed(head)
    batch = torch.randn(8, *shape), torch.randint(classes, (8,))
    method.begin_task(head, [batch])
    optimizer = torch.optim.SGD(method.network.parameters(), lr=0.1)
    method.attach(optimizer)
    method.network.train()
    for _ in range(2):
        method.step(batch, head, Moment(0, 0.0, 0.0), optimizer)
    method.consolidate([batch], lambda batch: batch[0].flatten(1)[:, 0])
    method.network.eval()


def make_method(heads: tuple[int, ...] = (2, 3, 2), build: Callable[..., nn.Module] | None = None) -> STL:
    torch.manual_seed(0)
    return STL(build((3, 32, 32), heads) if build else MLP((6, 5), heads), NoSettings(), exclude=["heads.*"])


def test_every_task_begins_with_the_weights_that_the_network_had_at_first() -> None:
    method = make_method()
    first = copy_weights(method.network)
    for head in range(3):
        train(method, head)
        assert any(not torch.equal(weight, first[name]) for name, weight in method.network.state_dict().items())
        method.begin_task(head + 1, [])
        assert all(torch.equal(weight, first[name]) for name, weight in method.network.state_dict().items())


def test_the_outputs_for_a_task_never_change_once_it_is_learned() -> None:
    method = make_method()
    inputs = torch.randn(9, 6, generator=torch.Generator().manual_seed(5))
    answers = []
    for head in range(3):
        train(method, head)
        answers.append(method.network(inputs, head))
        for earlier, expected in enumerate(answers):
            assert torch.equal(method.compute_logits(inputs, earlier), expected)
    assert not torch.equal(method.network(inputs, 0), answers[0])


def test_a_repeated_task_is_learned_anew() -> None:
    method = make_method()
    for head in (0, 1, 0):
        train(method, head)
    inputs = torch.randn(9, 6)
    assert torch.equal(method.compute_logits(inputs, 0), method.network(inputs, 0))
    assert method.compute_capacity() == 200


@pytest.mark.parametrize("kind", ["split", "permuted"])
def test_no_accuracy_ever_changes_and_capacity_grows_by_a_network_a_task(kind: str, tmp_path: Path) -> None:
    learner = run(tmp_path, small("stl", kind=kind))
    last = learner.accuracies[-1]
    assert learner.accuracies == [last[:1], last[:2], last]
    assert min(last) > (80 if kind == "split" else 50)
    tasks = of_kind(events(tmp_path), "task")
    assert [task["capacity"] for task in tasks] == [100, 200, 300]
    size = sum(weight.nbytes for weight in learner.network.parameters())
    for position, task in enumerate(tasks):
        assert task["bytes"] == {"network": size, "weights": position * size, "first weights": size}
    assert events(tmp_path)[-1]["bwt"] == 0


def test_the_first_task_is_learned_as_by_finetuning(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", small("finetune", tasks=1))
    learner = run(tmp_path / "stl", small("stl"))
    assert learner.accuracies[0] == alone.accuracies[0]
    of_both = [of_kind(events(tmp_path / name), "epoch")[:2] for name in ("alone", "stl")]
    assert of_both[0] == of_both[1]


def test_the_weights_of_every_task_begin_as_the_seeds_network_also_after_a_resume(tmp_path: Path) -> None:
    config = small("stl")
    learner = run(tmp_path, config)
    assert isinstance(learner.method, STL)
    again = STL(MLP((64, 100, 100), (2, 2, 2)), NoSettings())  # with other weights
    again.load_state_dict(learner.method.state_dict())
    again.begin_task(3, [])
    assert same_weights(again.network, build_network(config, stream_of(config)))


@pytest.mark.parametrize("build", [LeNet, ResNet18, lambda *shape: ResNet18(*shape, statistics="stored")])
def test_networks_with_convolutions_have_the_same_outputs_after_loading(build: Callable[..., nn.Module]) -> None:
    def channels_last(*shape: Any) -> nn.Module:
        return build(*shape).to(memory_format=torch.channels_last)

    method = make_method((2, 2), channels_last)
    inputs = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    train(method, 0, (3, 32, 32))
    expected = method.network(inputs, 0)
    train(method, 1, (3, 32, 32))
    assert torch.equal(method.compute_logits(inputs, 0), expected)
    # As a file gives them back.
    state = method.state_dict()
    state["earlier"] = {
        head: {name: weight.contiguous() for name, weight in weights.items()}
        for head, weights in state["earlier"].items()
    }
    again = make_method((2, 2), channels_last)
    again.load_state_dict(state)
    again.network.eval()
    assert torch.equal(again.compute_logits(inputs, 0), expected)
    for name, weight in again.network.state_dict().items():  # another memory format might round otherwise
        assert again.state_dict()["earlier"]["0"][name].stride() == weight.stride()


def test_bytes_are_those_of_the_state() -> None:
    method = make_method()
    sizes = []
    for head in range(3):
        train(method, head)
        state = method.state_dict()
        groups = [state["first"], *state["earlier"].values()]
        sizes.append(sum(weight.nbytes for group in groups for weight in group.values()))
        assert sum(method.count_bytes().values()) == sizes[-1]
    assert sizes == [sizes[0], 2 * sizes[0], 3 * sizes[0]]
    assert METHODS["stl"] is STL
    assert not STL.keeps_data
